"""Loops over chunks are counted in a plan, and the plan stays what it is when they run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import write_llama
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from llama_ft.plan.fake import chunk_loops
from llama_ft.plan.fake.chunk_loops import CHUNKS, LoopCall
from llama_ft.plan.fake.tracker import MemoryTracker

CHUNK = 64
TOKENS = 20 * CHUNK
SHAPE = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
OPTIONS = {
    "chunk_size": CHUNK,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": True,
}


@contextmanager
def loops_run() -> Iterator[None]:
    """In the block, plans run all loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_loops, "LOOPS", ())
        yield


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--use_peft --target_modules all-linear --activation_checkpointing full", marks=pytest.mark.slow),
        pytest.param("--activation_checkpointing none", marks=pytest.mark.slow),
        pytest.param("--activation_checkpointing selective --use_peft", marks=pytest.mark.large),
        pytest.param("--activation_checkpointing full --activation_offload", marks=pytest.mark.large),
        pytest.param("--activation_checkpointing none --quantization 4bit --use_peft", marks=pytest.mark.large),
    ],
)  # fmt: skip
def test_a_plan_that_counts_loops_equals_one_that_runs_them(
    plan: Callable[..., Any], tmp_path: Path, flags: str
) -> None:
    folder = write_llama(tmp_path / "model", **SHAPE)
    words = (*flags.split(), "--context_length", str(TOKENS))
    counted = plan(folder, 1, *words, device="cuda")
    with loops_run():
        run = plan(folder, 1, *words, device="cuda")
    for few, many in zip(counted.peaks, run.peaks, strict=True):
        assert few.phase == many.phase
        assert few.bytes == pytest.approx(many.bytes, rel=0.01), few.phase
    assert counted.reserved_bytes == pytest.approx(run.reserved_bytes, rel=0.01)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_memory_of_a_loop_grows_by_the_same_with_each_chunk(keeps: bool) -> None:
    inputs = [(1, CHUNK, 2, 16)] * 2 + [(1, CHUNK, 4, 16)] + [(1, CHUNK, 4)] * 2
    dtypes = (torch.bfloat16,) * 3 + (torch.float32, torch.bfloat16)
    call = LoopCall(
        torch_chunk_gated_delta_rule, tuple(inputs), dtypes, (True,) * 5, tuple(OPTIONS.items()), keeps
    )  # fmt: skip
    meter = MemoryTracker("cuda")
    few, more, many = (meter.measure(call.of_tokens(CHUNK * count)) for count in (*CHUNKS, 20))
    further = few.further(more, (20 - CHUNKS[0]) / (CHUNKS[1] - CHUNKS[0]))
    # torch writes a gradient of the whole sequence for each chunk; a GPU's kernel does not
    assert many.moved_backward >= further.moved_backward
    assert replace(many, moved_backward=further.moved_backward) == further
    assert (many.graph > 0) == keeps and (many.backward > 0) == keeps
