"""benchmarks/gpu_check.py, whose small parts run on the CPU: the command that is to prove CUDA has
so been run."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import load_script
from forked import REPOSITORY, Finished, forked, start_forked

SCRIPT = REPOSITORY / "benchmarks" / "gpu_check.py"
RUNS_THE_RECIPES = (
    "waits,resume,save,ends,lora8b,quant8b,full,fixes,inference,cases,methods,further,two_ranks"
)
PAGE = REPOSITORY / "docs" / "development" / "gpu-check.md"


def run_check(output: Path, seconds: float, *flags: str) -> tuple[Finished, list[dict[str, str]]]:
    """The finished command, and the lines of gpu_check.jsonl."""
    directories = ["--output", str(output / "results"), "--scratch", str(output / "scratch")]
    limits = ["--seconds", str(seconds)]
    finished = forked(SCRIPT, *flags, *limits, *directories, timeout=seconds + 200)
    lines = (output / "results" / "gpu_check.jsonl").read_text().splitlines()
    return finished, [json.loads(line) for line in lines]


def check(parts: str, output: Path, seconds: float) -> list[dict[str, str]]:
    """The table's lines of some parts, all of which hold."""
    finished, rows = run_check(output, seconds, "--only", parts)
    assert finished.exit_code == 0, finished.output
    assert {row["check"] for row in rows} == set(parts.split(","))
    assert [row["claim"] for row in rows if row["ok"] is not True] in ([], ["device"])
    return rows


@pytest.mark.large  # a run of the command itself is among the fast tests, too
def test_checks_of_sharded_tensors_pass_on_the_cpu(tmp_path: Path) -> None:
    rows = check("sharded", tmp_path, 200)
    found = {row["claim"]: row["found"] for row in rows}
    assert {
        found[f"torch.{dtype} gathered"] for dtype in ("int8", "uint8", "int32", "bfloat16")
    } == {"equal"}


@pytest.mark.slow
def test_kernel_checks_pass_on_the_cpu(tmp_path: Path) -> None:
    check("start,attention,triton,quantized", tmp_path, 200)


def test_a_command_ends_in_time_and_lists_skipped_cases(tmp_path: Path) -> None:
    started = time.monotonic()
    finished, rows = run_check(tmp_path, 5, "--command", "3")
    assert time.monotonic() - started < 150
    assert finished.exit_code == 0, finished.output
    assert "left out: resume all of it, ends all of it, oom all of it" in finished.output
    assert {row["ok"] for row in rows} == {None}
    # on a CPU nothing is checked
    unchecked = (tmp_path / "results" / "not_checked.txt").read_text()
    assert "two_ranks: two ranks, full; " in unchecked


def test_the_page_has_the_list_of_what_no_gpu_has_checked() -> None:
    finished = forked(SCRIPT, "--not_checked")
    assert finished.exit_code == 0, finished.output
    assert finished.output.strip() in PAGE.read_text()


def test_the_rows_of_a_command_without_start_name_the_gpu_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = load_script(SCRIPT)
    monkeypatch.setattr(check, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    command = ["gpu_check", "--only", "oom", "--seconds", "5", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--scratch", str(tmp_path / "scratch")])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):  # `main` sets them for its processes
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    assert check.main() == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [row["claim"] for row in rows] == ["device", "all of it"]
    assert rows[0]["found"] == "NVIDIA L4"
    assert check.read_rows(tmp_path) == rows


def test_files_whose_waits_are_not_for_the_gpu_exist() -> None:
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.gpu.gpu_child import ON_HOST

    names = {file.name for file in (REPOSITORY / "src").rglob("*.py")}
    assert names >= {*ON_HOST}


def test_what_holds_on_a_gpu_leaves_the_list(tmp_path: Path) -> None:
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.gpu.gpu_coverage import not_checked, read_rows

    device = {"check": "start", "claim": "device", "found": "NVIDIA L4", "ok": True}
    rows = [
        device,
        {"check": "further", "claim": "KTO", "ok": True},
        {"check": "further", "claim": "ORPO", "ok": False},
        {"check": "ends", "claim": "finishes", "ok": True},
        {"check": "ends", "claim": "SIGTERM", "ok": False},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gpu_check.jsonl").write_text(lines)
    table = not_checked(read_rows(tmp_path))
    assert "further: ORPO; " in table
    assert "start: " not in table
    assert "ends: " in table  # one of its checks failed
    (tmp_path / "gpu_check.jsonl").write_text(lines.replace("true", "null", 1))  # a CPU
    assert "further: KTO; ORPO; " in not_checked(read_rows(tmp_path))


def test_speed_factors_are_measured_over_computed_speeds() -> None:
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.gpu.gpu_factors import name_in_fit, planned_per_token, speed_factors

    devices = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "Tesla V100-SXM2-32GB": "v100-32",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
        "AMD Instinct MI300X": "",
    }
    assert {device: name_in_fit(device) for device in devices} == devices

    plan = {"tokens": 4096, "micro_batches": 2, "step_flops": 8192 * 4e10, "step_bytes": 8192 * 5e7}
    runs = {"lora": 12_000, "lora, short samples": 11_000, "qlora": 9_000}
    rows: list[dict[str, Any]] = [{"claim": "device", "found": "NVIDIA H100 80GB HBM3"}]
    for run, speed in runs.items():
        rows.append({"claim": f"{run}: tokens/s", "found": f"{speed:,}, MFU 40.0%"})
        rows.append({"claim": f"{run}: planned per token", "found": planned_per_token(plan)})
    seconds = 4e10 / (0.65 * 989e12) + 5e7 / (0.75 * 3350e9)
    assert speed_factors(rows) == f'"h100": {11_000 * seconds:.2f},  # runs: 3'

    finished = forked(SCRIPT, "--speed_factors")
    assert finished.output.strip() == "no published result has speeds"


def test_an_unknown_part_is_a_user_error(tmp_path: Path) -> None:
    finished = forked(SCRIPT, "--only", "waits,speed", "--output", str(tmp_path))
    assert finished.exit_code == 2
    assert "--only speed: expected some of start, attention" in finished.output


@pytest.mark.slow
def test_a_failed_computation_is_recorded_and_the_others_still_run(tmp_path: Path) -> None:
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.gpu.gpu_bench import Bench

    bench = Bench(tmp_path / "results", tmp_path / "scratch", 200)
    checks: dict[str, list[str]] = {"torch": [], "no such library": [], "fire": []}
    errors = {case.name: case.error for case in bench.run(checks, recipe="start")}
    assert errors == {
        "torch": "",
        "no such library": "exit code 1: KeyError: 'no such library'",
        "fire": "",
    }
    assert "Traceback" in (tmp_path / "results" / "failed.log").read_text()


def test_a_terminated_command_ends_the_processes_that_it_started(tmp_path: Path) -> None:
    directories = ["--output", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    words = ["--only", "ends", "--seconds", "200", *directories]
    running = start_forked(SCRIPT, *words, output=tmp_path / "output")
    [process] = running.processes
    started: list[psutil.Process] = []
    until = time.monotonic() + 100
    while len(started) < 2 and time.monotonic() < until:  # torchrun and its rank
        time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert running.wait(60) == 143, (tmp_path / "output").read_text()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert len(started) >= 2
    assert not alive


@pytest.mark.large
def test_every_part_that_runs_a_recipe_passes_on_the_cpu(tmp_path: Path) -> None:
    found = {row["claim"]: row["found"] for row in check(RUNS_THE_RECIPES, tmp_path, 1800)}
    assert found.keys() >= {
        "SIGTERM",
        "kill -9",
        "losses after step 3",
        "LoRA, nf4",
        "MoE, LoRA, nf4",
        "DPO, LoRA",
        "lora: tokens/s",
        "perf/save_stall_seconds",
    }
    assert float(found["qlora: tokens/s"].split(",")[0]) > 0
    assert float(found["qlora: planned / anonymous_peak_bytes"].split()[0]) > 0
    assert "ms per step" in (tmp_path / "results" / "profile-lora.txt").read_text()


@pytest.mark.large
def test_failed_and_slow_cases_are_recorded_and_the_others_still_run(tmp_path: Path) -> None:
    """SGD's update asks on the host whether the step has failed."""
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.gpu.gpu_bench import Bench

    bench = Bench(tmp_path / "results", tmp_path / "scratch", 400)
    flags = [*bench.tiny(), "--max_train_step", "3", "--device", "cpu"]
    runs = {
        "SGD": [*flags, "--optimizer", "SGD"],
        "typo": [*flags, "--lrr", "1"],
        "AdamW": flags,
    }
    errors = {case.name: case.error for case in bench.run(runs, toggle="fail at waits", limit=100)}
    assert "the host waits for the device: _local_scalar_dense" in errors["SGD"]
    assert errors["typo"].startswith("exit code 2: ")
    assert errors["AdamW"] == ""
    kept = (tmp_path / "results" / "failed.log").read_text()
    assert "=== SGD: exit code 1" in kept
    assert "Did you mean --lr?" in kept.split("=== typo", 1)[1]
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "scratch" / "tiny").iterdir()}
    assert len(made) > 3

    # a case that does not end is killed, and the next one runs
    endless = [*bench.tiny(), "--num_epochs", "100000", "--device", "cpu"]
    slow = {"before": flags, "endless": endless, "after": flags}
    errors = {case.name: case.error for case in bench.run(slow, limit=20)}
    assert errors["before"] == errors["after"] == ""
    assert errors["endless"].startswith("over 20 s: ")

    # the next command finds the models; a case that does not end before the limit is killed
    again = Bench(tmp_path / "results", tmp_path / "scratch", 30)
    started = time.monotonic()
    (case,) = list(again.run({"endless": endless}))
    assert case.error == "left out: too little time"
    assert time.monotonic() - started < 40
    assert {file: file.stat().st_mtime_ns for file in made} == made
