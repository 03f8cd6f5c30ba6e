"""Runs every case of cases.json on an emulated GPU, and writes into results-RANK.json what it did:
python job.py FOLDER/cases.json

A case is recipes/finetuning.py with flags, or a snippet of Python. Launches and waits are recorded of
the second step and its end, without the sampling of answers, or of the second sampling alone."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from conftest import RECIPE, load_script, series
from emulated_cuda.device import load_guard
from emulated_cuda.recorder import RECORDER
from emulated_cuda.torch_cuda import emulated

from llama_ft.config.reading.parse import as_keywords
from llama_ft.extensions.rollouts.sampling import OwnSampler
from llama_ft.observe import flops
from llama_ft.run import TrainingRun
from llama_ft.runtime import process_group

RECORDED_CALL = 2  # the first step also makes the optimizer's states
GPU = int(os.environ.get("LOCAL_RANK", "0"))
GPUS = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def raise_error(error: BaseException, _: Any) -> NoReturn:
    """Leave a failed run without ending the process, which has other cases to run."""
    raise error


def recorded(function: Callable[..., Any], is_wanted: bool) -> Callable[..., Any]:
    """Record what one of the calls does; nothing if it is not wanted."""
    calls = 0

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        with RECORDER.recording(is_wanted and calls == RECORDED_CALL):
            return function(*args)

    return call


def run_recipe(case: dict[str, Any], flags: list[str], device: str, output: Path) -> list[float]:
    """Return the compared number of each step."""
    finetuning = load_script(RECIPE)
    is_sampling = case["records"] == "sampling"
    finetuning.train_step = recorded(finetuning.train_step, not is_sampling)
    flags = [*flags, "--device", device, "--output_dir", str(output)]
    with (
        patch.object(OwnSampler, "sample", recorded(OwnSampler.sample, is_sampling)),
        patch.object(TrainingRun, "end_step", recorded(TrainingRun.end_step, not is_sampling)),
    ):
        finetuning.main(**as_keywords(flags))
    return series(output, case["compares"])


def run_case(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a case did, and its losses: on the emulated GPU, there in fp32, and in fp32 on the
    CPU."""
    RECORDER.clear()
    result: dict[str, Any] = {"error": ""}
    started = time.process_time()
    try:
        with emulated(tuple(case["capability"]), GPU, GPUS):
            if "snippet" in case:
                with RECORDER.recording():
                    exec(case["snippet"], {"torch": torch})
            else:
                result["losses"] = run_recipe(case, case["flags"], "cuda", folder / "gpu" / name)
        result["launches"] = dict(RECORDER.launches)
        result["waits"] = dict(RECORDER.waits)
        result["problems"] = dict(RECORDER.problems)
        if exact := case.get("exact flags"):
            with emulated(tuple(case["capability"]), GPU, GPUS):
                result["losses in fp32"] = run_recipe(case, exact, "cuda", folder / "fp32" / name)
        if flags := case.get("flags on the CPU"):
            result["losses on the CPU"] = run_recipe(case, flags, "cpu", folder / "cpu" / name)
    except (Exception, SystemExit):
        if GPUS > 1:  # the other ranks would wait
            raise
        result["error"] = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
    print(f"{name}: {time.process_time() - started:.1f} CPU seconds", flush=True)
    return result


if __name__ == "__main__":
    file = Path(sys.argv[1])
    load_guard(file.with_name("cuda_guard.so"), GPU, GPUS)
    process_group.exit_process = raise_error
    flops.SECONDS_MEASURED = 0.0
    cases = json.loads(file.read_text())
    results = {name: run_case(name, case, file.parent) for name, case in cases.items()}
    file.with_name(f"results-{GPU}.json").write_text(json.dumps(results))
