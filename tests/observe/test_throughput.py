"""What a run says of its speed, step by step."""

import json
from pathlib import Path

import pytest
import torch
from tiny_llama import tiny_llama
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from llama_ft.config import ProfileConfig
from llama_ft.observe import RunMetadata, ThroughputMeter
from llama_ft.observe.flops import flop_formula
from llama_ft.runtime import Ranks

LENGTHS = [5, 9, 7]
TOKENS = 21
TARGETS = 6


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def watch(
    model: LlamaForCausalLM, folder: Path, runtime: Ranks, **settings: bool
) -> ThroughputMeter:
    return ThroughputMeter(
        model, ProfileConfig(**settings), torch.float32, folder, RunMetadata(folder), runtime
    )


class Clock:
    """The time, which only a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def perf_counter(self) -> float:
        return self.seconds


def test_a_step_is_timed_from_the_end_of_the_one_before_without_evaluation(
    model: LlamaForCausalLM, runtime: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("llama_ft.observe.throughput.time", clock)
    with watch(model, tmp_path, runtime) as speed:
        for step in (1, 2, 3):
            speed.begin_step(step, LENGTHS, TARGETS, waited_seconds=0.02)
            clock.seconds += 0.05 * step
            speed.end_step(step, TOKENS, speed.flops)
            clock.seconds += 0.3  # logging after step 1, an evaluation after step 2
            if step == 2:
                speed.pause()
        metrics = [speed.metrics(step) for step in (1, 2, 3)]
    seconds = [one["perf/step_seconds"] for one in metrics]
    assert seconds == pytest.approx([0.05, 0.3 + 0.1, 0.15])
    first = metrics[0]
    assert first["perf/data_wait_seconds"] == 0.02
    assert first["perf/tokens_per_second"] == pytest.approx(TOKENS / first["perf/step_seconds"])
    rate = sum(
        json.loads((tmp_path / "facts.json").read_text())["speed"]["product_flops_per_second"]
    )
    flops = sum(flop_formula(model).of(LENGTHS, TARGETS))
    assert "perf/mfu" not in first, "a CPU has no published peak"
    assert first["perf/matmul_utilization"] == pytest.approx(
        flops / rate / first["perf/step_seconds"]
    )


@pytest.mark.parametrize("done", [2, 3, 5])  # the profiler is prepared, about to begin, or at work
def test_a_run_that_ends_before_its_profile_stops_the_profiler(
    model: LlamaForCausalLM, runtime: Ranks, tmp_path: Path, done: int
) -> None:
    with watch(model, tmp_path, runtime, use_profiler=True) as speed:
        for step in range(1, done + 1):
            speed.begin_step(step, LENGTHS, TARGETS, 0.0)
            speed.end_step(step, TOKENS, speed.flops)
    assert (tmp_path / "profile").exists() == (done > 2), "a shorter profile is a profile"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in profiler.key_averages()}
