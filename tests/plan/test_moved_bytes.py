"""Bytes that operators of a plan move, compared with those counted by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import write_llama
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from llama_ft.observe.flops import peak_of
from llama_ft.plan.duration import BANDWIDTH_SHARE, BANDWIDTHS, MATMUL_SHARE, peak_name
from llama_ft.plan.fake.moved_bytes import FLOPS_PER_BYTE, MovedBytes, bytes_of

Plan = Callable[..., Any]
ROWS = 4
COLUMNS = 8
SIZE = 4 * ROWS * COLUMNS  # bytes of x
WIDE = 1024
FLAGS = ("--context_length", "128", "--batch_size_training", "1", "--optimizer", "AdamW")


class Counted(TorchDispatchMode):
    """Counts the bytes of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes += bytes_of(func, args, kwargs or {}, result)
        return result


def moved_by(compute: Callable[[], Any]) -> int:
    """The bytes of the operators of a function."""
    with Counted() as counted:
        compute()
    return counted.bytes


def tensor() -> torch.Tensor:
    return torch.ones(ROWS, COLUMNS)


X = tensor()
Y = tensor()
LEFT = torch.ones(ROWS, 1)
RIGHT = torch.ones(1, COLUMNS)
HEADS = torch.ones(1, 2, 16, 8)
STEP = torch.tensor(1.0)
STATES: Any = ([tensor()], [Y], [tensor()], [tensor()], [], [STEP])
ADAMW: Any = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
ADAMW |= {"amsgrad": False, "maximize": False}
OPERATORS: dict[str, tuple[Callable[[], Any], int]] = {
    "sum": (lambda: X + Y, 3 * SIZE),
    "in place": (lambda: tensor().add_(Y), 3 * SIZE),
    "overwritten product": (
        lambda: tensor().addmm_(LEFT, RIGHT, beta=0),
        SIZE + 4 * (ROWS + COLUMNS),
    ),
    "overwritten": (lambda: X.copy_(Y), 2 * SIZE),
    "cast": (lambda: X.bfloat16(), SIZE + SIZE // 2),
    "views": (lambda: X.view(-1)[2:].expand(3, -1), 0),
    "allocation": (lambda: torch.empty(ROWS, COLUMNS), 0),
    "broadcast": (lambda: X + Y[:1].expand(ROWS, COLUMNS), 2 * SIZE + SIZE // ROWS),
    "rows of a table": (lambda: functional.embedding(STEP.long().view(1), X), 2 * SIZE // ROWS),
    "several": (lambda: torch._foreach_add_([X, Y], 1.0), 2 * 2 * SIZE),
    "attention": (lambda: functional.scaled_dot_product_attention(HEADS, HEADS, HEADS), 0),
    # reads the weight, the gradient and two states, writes all but the gradient; reads the step
    "AdamW": (lambda: torch._fused_adamw_(*STATES, **ADAMW), 7 * SIZE + STEP.nbytes),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_moves_what_it_reads_and_writes(name: str) -> None:
    compute, expected = OPERATORS[name]
    made = {"in place": SIZE, "overwritten product": SIZE, "rows of a table": 4 + 8}.get(
        name, 0
    )  # of operators before it
    assert moved_by(compute) - made == expected


def test_a_matmul_waits_for_its_flops_and_one_with_low_rank_for_its_bytes() -> None:
    x = torch.ones(WIDE, WIDE)
    low = torch.ones(WIDE, 4)
    assert moved_by(lambda: x @ x) == 0
    assert moved_by(lambda: x @ low) == x.nbytes + 2 * low.nbytes
    # which is so on every GPU
    for gpu, bandwidth in BANDWIDTHS.items():
        flops = MATMUL_SHARE * peak_of(peak_name(gpu), torch.float16)
        assert flops / (BANDWIDTH_SHARE * bandwidth * 1e9) > FLOPS_PER_BYTE, gpu


def test_a_kernel_of_several_operators_moves_its_arguments_once() -> None:
    weight = tensor()
    moved = MovedBytes()
    moved.enter("optimizer step")

    def update(weight: torch.Tensor, others: list[torch.Tensor]) -> None:
        for other in others:
            weight.mul_(0.5).add_(other)

    moved.count_kernel(update, (weight, [X, Y]))
    assert moved.of_step(1) == 0  # no micro-batch was planned
    assert [phase.bytes for phase in moved.phases] == [4 * SIZE]  # the weight is written, too


def test_micro_batches_that_were_not_planned_move_as_much_as_the_last_one() -> None:
    moved = MovedBytes()
    for forward, backward in ((5, 10), (6, 13)):  # the second one adds gradients
        moved.enter("forward")
        moved.add(forward)
        moved.enter("backward")
        moved.add(backward)
    moved.enter("optimizer step")
    moved.add(100)
    moved.enter("evaluation")
    moved.add(1000)
    assert moved.of_step(2) == 15 + 19 + 100
    assert moved.of_step(5) == 15 + 4 * 19 + 100


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """config.json of a small Llama, and no weights."""
    shape = {"num_hidden_layers": 7, "vocab_size": 1000, "max_position_embeddings": 4096}
    return write_llama(tmp_path / "model", **shape)


def test_a_layer_moves_the_numbers_that_are_counted_by_hand(plan: Plan, tmp_path: Path) -> None:
    """Llama's layer in full fine-tuning, from the code of Transformers. Each line: numbers that kernels
    read and write per token. Two norms and two residuals; queries and keys are rotated."""
    hidden, inner, head = 2048, 8192, 128
    query, key, value = 16 * head, 4 * head, 4 * head
    forward = 2 * 2 * hidden + 2 * 3 * hidden
    forward += (2 + 2 + 3 + 1 + 2) * (query + key)  # two products, their sum, the negated half, cat
    forward += (2 + 3) * inner  # SiLU, times the other matmul
    # gradients of norms; sums at residuals, of two matmuls in the MLP, of three in attention
    backward = 2 * 3 * hidden + 2 * 3 * hidden + 3 * hidden + 2 * 3 * hidden
    # two products, the negated half, its two halves padded with zeros, sums of all three
    backward += (2 + 2 + 1 + 2 * 1.5 + 2 * 3) * (query + key)
    backward += (3 + 3 + 3) * inner  # two products, SiLU
    backward += (2 + 2) * (query + key + value)  # made contiguous, and given a dimension of samples
    cosines = 2 * 4 * head

    found = {}
    for layers in (2, 3):
        shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": head}
        positions = {"max_position_embeddings": 4096}
        folder = write_llama(tmp_path / f"{layers}", **shape, **heads, **positions)
        for length in (2048, 4096):
            flags = ("--context_length", str(length), "--batch_size_training", "1")
            flags += ("--activation_checkpointing", "off", "--gradient_accumulation_steps", "1")
            found[layers, length] = plan(folder, 1, *flags, device="cuda").step_bytes
    # without weights and optimizer, and without embedding and loss
    of_layer = {length: found[3, length] - found[2, length] for length in (2048, 4096)}
    per_token = (of_layer[4096] - of_layer[2048]) / 2048
    assert per_token == pytest.approx(2 * (forward + backward + cosines), rel=1e-3)


def test_a_quick_plan_counts_all_layers(plan: Plan, model: Path) -> None:
    whole = plan(model, 1, *FLAGS, device="cuda")
    quick = plan(model, 1, *FLAGS, device="cuda", quick=True)
    assert quick.is_quick
    assert quick.step_bytes == pytest.approx(whole.step_bytes, rel=1e-3)


def test_pieces_that_the_planner_leaves_out_are_counted(plan: Plan, model: Path) -> None:
    """Of 4 pieces of an MLP it leaves out none, of 16 it leaves out 12."""
    flags = ("--context_length", "4096", "--batch_size_training", "1", "--use_peft")
    flags += ("--target_modules", "q_proj")
    few = plan(model, 1, *flags, "--tiled_mlp", "1024", device="cuda", quick=True)
    many = plan(model, 1, *flags, "--tiled_mlp", "256", device="cuda", quick=True)
    assert many.step_bytes == pytest.approx(few.step_bytes, rel=0.05)


def test_an_update_by_anyprecision_is_one_kernel(plan: Plan, model: Path) -> None:
    """Per bf16 weight: 2 bytes of the weight and of each state are read and written, 2 of the gradient
    are read, 6 of random numbers are written and read."""
    flags = (*FLAGS[:-1], "anyprecision", "--precision", "bf16_pure")
    steps = {}
    for optimizer in ("anyprecision", "SGD"):
        planned = plan(model, 1, *FLAGS[:-1], optimizer, *flags[-2:], device="cuda")
        steps[optimizer] = planned.step_bytes
    weights = planned.peaks[0].holders["sharded parameters"] / 2
    per_weight = (steps["anyprecision"] - steps["SGD"]) / weights
    # SGD reads weight and gradient, and writes the weight
    assert per_weight == pytest.approx(3 * 4 + 2 + 2 * 6 - 6, abs=0.1)
