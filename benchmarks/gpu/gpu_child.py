"""The process that gpu_check.py starts for its cases: a recipe, once per list of flags, or checks
of gpu_kernels."""

import functools
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import gpu_kernels
from benchmarks.gpu.gpu_bench import ON_GPU, RECIPES

WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "is_nonzero",
}
# Look at tensors of the host, on a GPU too. block_attention.py is for CPUs only.
ON_HOST = ("sampler.py", "rendezvous.py", "base.py", "packed_attention.py", "block_attention.py")


class CountWaits(TorchDispatchMode):
    """Counts operators that make the host wait for the device; on the CPU they are cheap and show
    all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []  # operator and line of the nearest frame outside torch

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name in WAITING:
            frames = [
                frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename
            ]
            self.found.append(
                f"{name} at line {frames[-1].lineno} of {Path(frames[-1].filename).name}"
            )
        return function(*args, **(kwargs or {}))


def run_child(case_file: Path, recipe: str, toggle: str) -> None:
    """Run all cases of a file, each by name with its flags, and write a line about each to
    done.jsonl as soon as it has ended. A case that fails ends the process."""
    from llama_ft.processes import end_with

    end_with(os.getppid())
    cases = json.loads(case_file.read_text())
    if recipe in gpu_kernels.PARTS:
        records = _compute(recipe, cases)
    else:
        records = _run_recipe(recipe, toggle, cases, case_file.parent)
    for record in records:
        sys.stdout.flush()
        sys.stderr.flush()
        # bytes so far: what follows is the next case's
        record["printed"] = [os.fstat(stream).st_size for stream in (1, 2)]
        with open(case_file.with_name("done.jsonl"), "a") as done:
            done.write(json.dumps(record) + "\n")


def _compute(part: str, cases: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Yield what each case of a part of gpu_kernels has found."""
    from llama_ft.runtime import Target, computing_on

    checks = gpu_kernels.PARTS[part]()
    target = Target.of(torch.device(gpu_kernels.DEVICE))
    for claim in cases:
        with computing_on(target):
            found, is_right = checks[claim].measure()
        if ON_GPU:
            torch.cuda.synchronize()  # an error of this case is not the next one's
        yield {"found": found, "ok": is_right}


def _run_recipe(
    recipe: str, toggle: str, cases: dict[str, list[str]], scratch: Path
) -> Iterator[dict[str, Any]]:
    """Run a recipe once per case.

    Yields:
        `seconds`: when its steps, or answers, began, and the end of the last one; `pinned_bytes`:
        the most pinned host memory, of torch's allocator and for checkpoints; `pinning_seconds`:
        in CUDA's calls for it.
    """
    from llama_ft.checkpoint import host_block
    from llama_ft.config.reading.load import load
    from llama_ft.config.reading.parse import as_keywords
    from llama_ft.errors import exit_on_error
    from llama_ft.inference.flags import read_inference_flags
    from llama_ft.inference.generate import Answerer

    sys.path.insert(0, str(RECIPES))  # inference.py imports finetuning.py
    spec = importlib.util.spec_from_file_location(recipe, RECIPES / f"{recipe}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seconds: list[float] = []

    def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seconds.append(time.perf_counter())
        return function(*args, **kwargs)

    pin = host_block._pin
    blocks: list[tuple[int, float]] = []  # bytes and seconds

    def timed_pin(block: torch.Tensor) -> bool:
        begun = time.perf_counter()
        is_pinned = pin(block)
        blocks.append((block.numel(), time.perf_counter() - begun))
        return is_pinned

    host_block._pin = timed_pin
    if toggle:
        TOGGLES[toggle](module, seconds)
    if recipe == "finetuning":
        module.train_step = functools.partial(timed, module.train_step)
    answer = Answerer.answer
    Answerer.answer = lambda *args, **kwargs: timed(answer, *args, **kwargs)
    for name, case_flags in cases.items():
        seconds.clear()
        blocks.clear()
        if recipe == "inference":
            module.main(read_inference_flags(case_flags, ""))
        else:
            flags = [*case_flags, "--output_dir", str(scratch / name)]
            with exit_on_error():
                load(flags)  # as_keywords leaves out unknown flags
            module.main(**as_keywords(flags))
        ended = time.perf_counter()
        pinned = torch.cuda.host_memory_stats() if ON_GPU else {}
        yield {
            "seconds": [*seconds, ended],
            "pinned_bytes": pinned.get("allocated_bytes.peak", 0)
            + max((nbytes for nbytes, _ in blocks), default=0),
            "pinning_seconds": pinned.get("host_alloc_time.total", 0) / 1e6
            + sum(spent for _, spent in blocks),
        }


def _limit_waits(most: int, recipe: ModuleType, seconds: list[float]) -> None:
    """End the process if the host waits for the device more than `most` times in a step after the
    first."""

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(seconds) < 2:
            return function(*args, **kwargs)
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn" if most else "error")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    result = function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            messages = [f"{each.message} {each.filename}:{each.lineno}" for each in caught]
            found = [message for message in messages if "synchronizing" in message]
        else:
            with CountWaits() as counter:
                result = function(*args, **kwargs)
            found = [wait for wait in counter.found if not wait.endswith(ON_HOST)]
        if len(found) > most:
            sys.exit(f"the host waits for the device: {'; '.join(sorted(set(found)))}")
        return result

    recipe.train_step = functools.partial(watched, recipe.train_step)


def _wait_per_micro_batch(recipe: ModuleType, seconds: list[float]) -> None:
    from transformers import masking_utils

    from llama_ft.models.base.replaced_functions import originals, replace_functions

    replace_functions()
    for name in ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa"):
        setattr(masking_utils, name, originals[name])


def _shard_adapters(recipe: ModuleType, seconds: list[float]) -> None:
    from llama_ft.models.sharding import fsdp

    leave_out = fsdp._used_as_stored

    def leave_out_frozen(*args: Any) -> set[Any]:
        return {parameter for parameter in leave_out(*args) if not parameter.requires_grad}

    fsdp._used_as_stored = leave_out_frozen


def _set_cudnn(enabled: bool, recipe: ModuleType, seconds: list[float]) -> None:
    """For all of the process, whatever it asks for later."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    torch.backends.cuda.enable_cudnn_sdp = lambda _: None


TOGGLES: dict[str, Callable[[ModuleType, list[float]], None]] = {
    "fail at waits": functools.partial(_limit_waits, 0),
    "fail over 3 waits": functools.partial(_limit_waits, 3),
    "fail over 4 waits": functools.partial(_limit_waits, 4),
    "a wait per micro-batch": _wait_per_micro_batch,
    "adapters in fully_shard": _shard_adapters,
    "cuDNN on": functools.partial(_set_cudnn, True),
    "cuDNN off": functools.partial(_set_cudnn, False),
}
