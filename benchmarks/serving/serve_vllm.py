"""Start vLLM's servers as forks of one process, which has imported vLLM once: that takes every
server three processes and a minute of a core.

Runs in the environment of vLLM, without llama_ft. Each line of stdin is JSON, `{"arguments": [...],
"log": file}`: a server is started and its process id is written to stdout. It ends by SIGTERM.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
    VLLM_LOGGING_LEVEL="DEBUG",  # says which adapters have no weights for a module
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)
plain_context = multiprocessing.get_context


def forking_context(method: str | None = None):
    """vLLM starts its engine and its worker by spawn on a CPU, which imports everything again."""
    return plain_context("fork")


multiprocessing.get_context = forking_context  # before vLLM is imported

import torch

# The wheel of torchvision is built for CUDA. Its import, which processors of images need, fails
# because torch for CPUs lacks these operators.
for name in ("nms", "qnms"):
    schema = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
    torch.library.define(f"torchvision::{name}", schema)

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser

registry._run_in_subprocess = lambda function: function()  # which would import vLLM once more
for module in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):  # of the engine and the worker
    importlib.import_module(module)


def serve(arguments: list[str], log: str) -> None:
    """Run a server until it is stopped."""
    os.setsid()  # its processes are one group
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    cli_env_setup()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    uvloop.run(run_server(parsed))


def main() -> None:
    """Start what stdin asks for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        asked = json.loads(line)
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                serve(asked["arguments"], asked["log"])
            finally:
                os._exit(1)
        print(process, flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    main()
