"""benchmarks/trl_comparison/comparison.py: its data set, its figure, and all of it for three steps with TRL."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import REPOSITORY
from forked import ENVIRONMENT

from llama_ft.data import build_demo, cache_dir

SCRIPT = REPOSITORY / "benchmarks" / "trl_comparison" / "comparison.py"
FILES = ("train", "validation", "held_out", "pairs", "held_out_pairs")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    yield


def python_with_trl() -> str | None:
    """This interpreter, or the one of the environment that benchmarks make; none if there is
    neither."""
    if importlib.util.find_spec("trl"):
        return sys.executable
    finished = sorted((cache_dir() / "benchmarks").glob("trl-*/finished"))
    return str(finished[-1].parent / "bin" / "python") if finished else None


TRL_PYTHON = python_with_trl()  # tests have a cache of their own


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_same_seed_writes_the_same_data_and_no_message_twice(tmp_path: Path) -> None:
    from benchmarks.trl_comparison.comparison_data import write_tickets

    write_tickets(tmp_path / "first")
    write_tickets(tmp_path / "second")
    messages = []
    for name in FILES:
        file = tmp_path / "first" / f"{name}.jsonl"
        assert file.read_bytes() == (tmp_path / "second" / f"{name}.jsonl").read_bytes()
        for sample in read_lines(file):
            chat = sample.get("messages") or sample["prompt"]
            messages.append(chat[1]["content"])
    assert len(messages) == len(set(messages)) > 2000


def test_a_rejected_response_has_exactly_one_wrong_field(tmp_path: Path) -> None:
    from benchmarks.trl_comparison.comparison_data import write_tickets

    write_tickets(tmp_path)
    for pair in read_lines(tmp_path / "pairs.jsonl"):
        chosen = json.loads(pair["chosen"][0]["content"])
        rejected = json.loads(pair["rejected"][0]["content"])
        assert chosen.keys() == rejected.keys()
        assert sum(chosen[name] != rejected[name] for name in chosen) == 1


def test_the_figure_has_every_step_and_evaluation_of_both_sides() -> None:
    from benchmarks.trl_comparison.comparison_figure import draw_figure

    side = {
        "losses": [2.0, 1.5, 1.0],
        "evaluations": [{"step": 0, "loss": 2.1}, {"step": 3, "loss": 0.9}],
    }
    training = {"steps": 3, "llama_ft": side, "TRL": side}
    figure = ElementTree.fromstring(draw_figure({"trainings": {"lora": training}}))
    namespace = "{http://www.w3.org/2000/svg}"
    curves = [
        path.attrib["d"] for path in figure.iter(f"{namespace}path") if " " in path.attrib["d"]
    ]
    by_steps = [curve for curve in curves if len(curve.split()) == 2 * 3]
    assert len(by_steps) == 2 and by_steps[0] == by_steps[1]
    circles = list(figure.iter(f"{namespace}circle"))
    assert len(circles) == 2 + 2 * 2  # two of them explain the others


@pytest.mark.slow
def test_the_recipes_batches_are_planned_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the comparison asks of llama_ft itself: without TRL nothing else would notice that a
    name has changed."""
    from benchmarks.trl_comparison import comparison

    model = build_demo(cache_dir()).model_dir
    words = f"comparison.py --folder {tmp_path} --length 256 --ranks 2 --micro_batch 2 --steps 3"
    monkeypatch.setattr(sys, "argv", words.split())
    asked = comparison.parse()
    compared = comparison.Comparison(asked, Path(sys.executable), model)
    micro_batches, validation = compared.plan(compared.training("lora"))
    assert len(micro_batches) == 3 * 2
    assert all(len(examples) == 2 for examples in micro_batches)
    assert len(validation) == 24


@pytest.mark.slow
@pytest.mark.skipif(TRL_PYTHON is None, reason="TRL is not installed: make comparison")
def test_three_steps_of_every_training_are_the_same_in_trl(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path)]
    command += ["--trl_python", str(TRL_PYTHON), "--model"]
    command += [str(build_demo(cache_dir()).model_dir), "--length", "256", "--seed", "3"]
    command += ["--steps", "3", "--eval_steps", "2", "--dpo_steps", "3", "--dpo_eval_steps", "2"]
    command += [
        "--micro_batch",
        "2",
        "--threads",
        "1",
        "--turns",
        "1",
        "--timed_steps",
        "3",
        "--scored",
        "2",
    ]
    environment = {**ENVIRONMENT, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    environment["LLAMA_FT_CACHE"] = str(cache_dir())
    finished = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert finished.returncode == 0, finished.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["trainings"]) == ["lora", "full", "dpo"]
    for training in result["trainings"].values():
        assert training["largest_validation_difference"] < 1e-4
        assert training["largest_training_difference"] < 1e-4
        steps = [record["step"] for record in training["TRL"]["evaluations"]]
        assert steps == [0, 2, 3]
    assert "| LoRA | 3 |" in (tmp_path / "table.md").read_text()
