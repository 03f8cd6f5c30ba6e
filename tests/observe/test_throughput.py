"""What a run says of its speed, step by step."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.config import ProfileConfig
from llama_ft.observe import RunMetadata, ThroughputMeter
from llama_ft.observe.flops import flop_formula
from llama_ft.runtime import Runtime

BATCHES = [SimpleNamespace(row_lengths=[5, 9], target_tokens=4), SimpleNamespace(row_lengths=[7], target_tokens=2)]
TOKENS = 21


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=120, **shape))


def watch(model: LlamaForCausalLM, folder: Path, runtime: Runtime, **settings: bool) -> ThroughputMeter:
    return ThroughputMeter(model, ProfileConfig(**settings), torch.float32, folder, RunMetadata(folder), runtime)


def test_a_steps_numbers_are_its_own_when_they_are_read_later(
    model: LlamaForCausalLM, runtime: Runtime, tmp_path: Path
) -> None:
    with watch(model, tmp_path, runtime) as speed:
        for step, seconds in ((1, 0.05), (2, 0.0)):
            speed.begin_step(step, BATCHES, waited_seconds=0.02)
            time.sleep(seconds)
            speed.end_step(step, TOKENS, speed.flops)
        first, second = speed.metrics(1), speed.metrics(2)
    assert 0.07 <= first["perf/step_seconds"] and second["perf/step_seconds"] >= 0.02
    assert first["perf/data_wait_seconds"] == 0.02
    assert first["perf/tokens_per_second"] == pytest.approx(TOKENS / first["perf/step_seconds"])
    rate = sum(json.loads((tmp_path / "facts.json").read_text())["speed"]["product_flops_per_second"])
    flops = sum(flop_formula(model).of([5, 9, 7], 6))
    assert "perf/mfu" not in first, "a CPU has no published peak"
    assert first["perf/matmul_utilization"] == pytest.approx(flops / rate / first["perf/step_seconds"])


@pytest.mark.parametrize("done", [3, 5])  # the profiler is prepared, or at work
def test_a_run_that_ends_before_its_profile_leaves_no_profiler_behind(
    model: LlamaForCausalLM, runtime: Runtime, tmp_path: Path, done: int
) -> None:
    with watch(model, tmp_path, runtime, use_profiler=True) as speed:
        for step in range(1, done + 1):
            speed.begin_step(step, BATCHES, 0.0)
            speed.end_step(step, TOKENS, speed.flops)
    assert (tmp_path / "profile").exists() == (done > 3), "a shorter profile is a profile"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in profiler.key_averages()}
