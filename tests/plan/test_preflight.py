"""The process that plans a run while it starts."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from model_shapes import write_llama

from llama_ft.config import Config, DataConfig
from llama_ft.extensions.images.planned_images import PlannedImages
from llama_ft.plan.preflight import PlannedMemory, planned_media
from llama_ft.runtime import Target

Plan = Callable[..., Any]
Said = Callable[[], str]
FLAGS = ("--enable_fsdp", "--context_length", "128", "--batch_size_training", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.json and no weights."""
    return write_llama(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Said:
    """What the run has logged."""
    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)
    caplog.set_level(logging.INFO, logger="llama_ft")
    return lambda: caplog.text


def report_plan(
    finetuning: ModuleType, folder: Path, run: Path, *flags: str
) -> tuple[int, Config, PlannedMemory | None]:
    """Do what a run of two ranks on the CPU does between its start and its first step. Return the
    planner's process id, the settings with which the run continues, and what it knows of its plan."""
    import torch

    from llama_ft.config import load
    from llama_ft.data.tokenize.statistics import BuildReport, SplitStatistics
    from llama_ft.plan.preflight import Preflight

    if torch.__version__ >= "2.15":
        pytest.skip(
            "a process that has used autograd, as tests have, cannot fork a planner; a run forks it before"
        )
    config, _ = load(
        ["--model_name", str(folder), "--dataset", "demo", *FLAGS, *flags], paths=False
    )
    start = Preflight(finetuning.RECIPE, off=False)
    planner = start._process
    report = BuildReport(train=SplitStatistics(samples=4, target_tokens=100))
    rows = SimpleNamespace(
        longest_example=None, target_share=1.0, validations={"": []}, media=None, report=report
    )
    steps = SimpleNamespace(size=None)
    cpu = torch.device("cpu")
    job = SimpleNamespace(world_size=2, local_world_size=2, device=cpu, target=Target())
    job.all_gather_floats = lambda *mine: torch.tensor([mine, mine], dtype=torch.float64)
    job.broadcast_from_rank0 = lambda make: make()
    config = start.start(config, folder, None, rows, steps, job)  # type: ignore[arg-type]
    planned = start.report(run, job)  # type: ignore[arg-type]
    assert planner.pid is not None
    return planner.pid, config, planned


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine plans for longer than a run waits."""
    monkeypatch.setattr("llama_ft.plan.preflight.SECONDS_FOR_PLAN", 200.0)


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        # the sample with the most images has 3 of 100 tokens
        ("packing", PlannedImages(3, 100, 0.004)),
        ("padding", PlannedImages(3, 100, 0.0)),
    ],
)
def test_a_run_plans_the_images_of_its_data(batching: str, expected: PlannedImages) -> None:
    counts = SimpleNamespace(media=40, media_tokens=3990, longest_media=290, tokens=10_000)
    report = SimpleNamespace(train=counts)
    rows: Any = SimpleNamespace(media=SimpleNamespace(planned=PlannedImages.of), report=report)
    config = Config(data=DataConfig(batching_strategy=batching))  # type: ignore[arg-type]
    assert planned_media(config, rows) == expected


@pytest.mark.parametrize(
    ("free_mib", "expected"), [(53, 0.1), pytest.param(7, 0.755, marks=pytest.mark.slow)]
)
def test_the_planned_share_of_the_free_memory_is_known_after_the_plan(
    free_mib: int,
    expected: float,
    finetuning: ModuleType,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run takes 5.3 MiB."""
    monkeypatch.setattr("llama_ft.plan.preflight.free_bytes", lambda *_: free_mib * 2**20)
    *_, planned = report_plan(finetuning, folder, tmp_path)
    assert planned is not None and not planned.keeps_units
    assert planned.share == pytest.approx(expected, abs=0.01)


def test_a_run_knows_whether_its_plan_keeps_units_for_answers(
    finetuning: ModuleType, folder: Path, tmp_path: Path
) -> None:
    """A training step needs more than they do."""
    from llama_ft.plan.types import read_plan

    *_, planned = report_plan(finetuning, folder, tmp_path, "--sample_tokens", "8")
    written = read_plan(tmp_path)
    assert planned is not None and planned.keeps_units
    assert written is not None and written.keeps_units
    assert written.kept_peaks and written.peaks == written.with_kept_units().peaks


def test_a_run_that_will_not_fit_gets_a_suggestion_that_does(
    finetuning: ModuleType,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Said,
) -> None:
    # and it takes 5.9 MiB
    monkeypatch.setattr("llama_ft.plan.preflight.free_bytes", lambda *_: 5 * 2**20)
    planner, *_ = report_plan(finetuning, folder, tmp_path)
    first, change, *_ = said().partition("This run will")[2].splitlines()
    assert "probably run out of memory" in first and "5.0 MiB" in first
    assert change.split()[0].startswith("--") and " would need " in change
    assert not Path(f"/proc/{planner}").exists()


def test_activation_checkpointing_auto_is_resolved_for_the_rank_with_the_least_memory(
    finetuning: ModuleType,
    plan: Plan,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Said,
) -> None:
    from llama_ft.plan.types import read_plan

    selective = plan(folder, 2, *FLAGS, "--activation_checkpointing", "selective")
    monkeypatch.setattr(
        "llama_ft.plan.preflight.free_bytes", lambda *_: int(selective.device_bytes / 0.97) + 1
    )
    planner, config, _ = report_plan(
        finetuning, folder, tmp_path, "--activation_checkpointing", "auto"
    )
    assert config.train.activation_checkpointing == "selective"
    written = read_plan(tmp_path)
    assert written is not None and written.peaks == selective.peaks
    assert "auto: selective (planned" in said()
    assert not Path(f"/proc/{planner}").exists()


def test_the_planner_ends_when_its_run_is_killed(finetuning: ModuleType) -> None:
    from llama_ft.plan.preflight import Preflight

    reading_end, writing_end = os.pipe()
    run = os.fork()
    if run == 0:
        try:
            start = Preflight(finetuning.RECIPE, off=False)
            os.write(writing_end, str(start._process.pid).encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing_end)
    os.waitpid(run, 0)
    stat = Path(f"/proc/{int(os.read(reading_end, 32))}/stat")
    deadline = time.monotonic() + 30
    while (
        stat.exists()
        and stat.read_text().rpartition(")")[2].split()[0] != "Z"
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def chosen(finetuning: ModuleType, folder: Path, room: float, *flags: str) -> Any:
    """What `activation_checkpointing auto` comes to be where a rank has so much room, in this
    process."""
    from llama_ft.config import load
    from llama_ft.plan.fit import choose_checkpointing
    from llama_ft.plan.types import PlanRequest

    line = [
        "--model_name",
        str(folder),
        "--dataset",
        "demo",
        "--activation_checkpointing",
        "auto",
        *FLAGS,
        *flags,
    ]
    config, _ = load(line, paths=False)
    config, why, plan = choose_checkpointing(
        PlanRequest(config, folder, 2, 2, "cpu"), finetuning.RECIPE, room
    )
    return config.train.activation_checkpointing, why, plan.device_bytes


@pytest.mark.slow
def test_activation_checkpointing_auto_is_the_cheapest_that_fits(
    finetuning: ModuleType, folder: Path, same_plans: Plan
) -> None:
    from llama_ft.config import load
    from llama_ft.plan.types import PlanRequest

    ways = ("off", "selective", "full")
    needs = {}
    for how in ways:
        line = ["--model_name", str(folder), "--dataset", "demo", "--activation_checkpointing", how]
        config, _ = load([*line, *FLAGS], paths=False)
        request = PlanRequest(config, folder, 2, 2, "cpu")
        needs[how] = same_plans(request, finetuning.RECIPE).device_bytes
    assert needs["off"] > needs["selective"] > needs["full"]
    for how in ways:
        choice, why, planned = chosen(finetuning, folder, int(needs[how] / 0.97) + 1)
        assert choice == how and planned == needs[how]
        assert why.startswith(f"{how} (planned: ") and why.count(", ") == ways.index(how)
    assert chosen(finetuning, folder, 2**20)[0] == "full"


@pytest.mark.slow
def test_selective_checkpointing_is_no_choice_if_layers_are_no_units(
    finetuning: ModuleType, folder: Path
) -> None:
    by_size = ("--fsdp_wrap_policy", "size", "--min_num_params", "1000")
    choice, why, _ = chosen(finetuning, folder, 2**20, *by_size)
    assert choice == "full" and "selective" not in why


def test_a_run_continues_with_a_torch_that_the_planner_does_not_know(
    finetuning: ModuleType,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Said,
) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    # The planner's process imports them again, and this one does not: its packages would keep the
    # new modules as attributes, and later tests would patch those.
    planner = ("llama_ft.plan.fit", "llama_ft.plan.predict", "llama_ft.plan.fake")
    for name in [name for name in sys.modules if name.startswith(planner)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(_fsdp_param_group, "foreach_reduce")
    _, config, _ = report_plan(finetuning, folder, tmp_path, "--activation_checkpointing", "auto")
    assert config.train.activation_checkpointing == "full" and "foreach_reduce" in said()
