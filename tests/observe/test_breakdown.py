"""The parts of a step: of a real profile on the CPU, and of a CUDA timeline written by hand."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.observe.breakdown import break_down


def profiled(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, float]:
    """A training step's parts."""
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step 4"):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    assert profiler.profiler is not None
    found = break_down(profiler.profiler.kineto_results.events(), "step 4", 2)
    assert found is not None
    return found


def test_the_parts_of_a_real_step_are_all_there() -> None:
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape))
    ids = torch.randint(300, (2, 256))
    profiled(model, ids)  # warms up
    found = profiled(model, ids)
    assert all(found[part] > 0 for part in ("matrix products", "attention", "other operators", "optimizer"))
    assert found["matrix products"] > found["attention"]


@dataclass
class Written:
    """An event as torch's profiler has them."""

    title: str
    span: tuple[int, int]
    thread: int = 1
    kind: int = 0
    sequence: int = -1
    id: int = 0
    launched_by: int = 0
    device: Any = DeviceType.CPU
    is_note: bool = False

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.span[0] * 10**9

    def end_ns(self) -> int:
        return self.span[1] * 10**9

    def start_thread_id(self) -> int:
        return self.thread

    def scope(self) -> int:
        return self.kind

    def sequence_nr(self) -> int:
        return self.sequence

    def correlation_id(self) -> int:
        return self.id

    def linked_correlation_id(self) -> int:
        return self.launched_by

    def device_type(self) -> Any:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.is_note


def kernel(title: str, begin: int, end: int, launched_by: int, is_note: bool = False) -> Written:
    return Written(title, (begin, end), launched_by=launched_by, device=DeviceType.CUDA, is_note=is_note)


def test_on_cuda_kernels_belong_to_their_operators_and_hidden_communication_is_not_seen() -> None:
    operators = [
        Written("step 4", (0, 100), id=1),
        Written("FSDP::all_gather (model.layers.0)", (1, 3), id=2),
        Written("aten::copy_", (1, 2), id=3),
        Written("aten::linear", (4, 6), sequence=5, id=4),
        Written("aten::mm", (5, 6), sequence=6, id=5),
        Written("cudaLaunchKernel", (5, 6), launched_by=5),
        Written("aten::mul", (7, 8), sequence=7, id=6),
        Written("autograd::engine::evaluate_function: MmBackward0", (10, 20), thread=2, id=7),
        Written("MmBackward0", (10, 20), thread=2, kind=1, id=8),
        Written("aten::linear", (11, 12), thread=2, sequence=9, id=9),
        Written("aten::mm", (13, 14), thread=2, id=10),
        Written("aten::mm", (120, 121), id=11),  # of the next step
    ]
    kernels = [
        kernel("copy", 2, 4, launched_by=3),
        kernel("ncclDevKernel_AllGather", 4, 20, launched_by=2),
        kernel("FSDP::all_gather", 2, 20, launched_by=2, is_note=True),
        kernel("gemm", 10, 30, launched_by=5),
        kernel("mul", 30, 35, launched_by=6),
        kernel("gemm", 40, 50, launched_by=9),
        kernel("gemm", 50, 70, launched_by=10),
        kernel("gemm", 120, 130, launched_by=11),
    ]
    found = break_down([*operators, *kernels], "step 4", 2)
    assert found is not None
    assert found == pytest.approx({
        "matrix products": 50, "attention": 0, "other operators": 5, "optimizer": 0,
        "communication": 8,  # 2 to 10; from there on a product hides it
        "Python and the rest": 37,
    })  # fmt: skip


def test_one_process_has_no_communication() -> None:
    events = [
        Written("step 4", (0, 100), id=1),
        Written("FSDP::pre_forward", (10, 40), id=2),
        Written("aten::mm", (50, 80), id=3),
    ]
    alone, of_two = (break_down(events, "step 4", world_size) for world_size in (1, 2))
    assert alone is not None and of_two is not None
    assert (alone["communication"], of_two["communication"]) == pytest.approx((0, 30))
    assert (alone["matrix products"], alone["Python and the rest"]) == pytest.approx((30, 70))


def test_a_block_that_was_not_profiled_has_no_parts() -> None:
    assert break_down([Written("aten::mm", (0, 1))], "step 4", 2) is None
