"""Optimizers against torch's and bitsandbytes' own on whole tensors; the learning rate against its
definitions."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from training.optimizers.optimizers_and_dump import (
    CASES,
    FOREIGN,
    LR,
    STEPS,
    Lion,
    build,
    resumed,
    train,
    whole,
)

from llama_ft.config import TrainConfig
from llama_ft.cpu import one_kernel
from llama_ft.runtime import Ranks
from llama_ft.training import build_optimizer, learning_rate, set_learning_rate
from llama_ft.training.optimizers import anyprecision
from llama_ft.training.optimizers.anyprecision import AnyPrecisionAdamW


def rates(total: int, **settings: object) -> list[float]:
    return [
        learning_rate(TrainConfig(lr=1.0, **settings), step, total, step // 10)
        for step in range(total)
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("scheduler", ["cosine", "linear", "constant"])
def test_every_step_has_the_learning_rate_of_transformers(
    scheduler: str, warmup_steps: int
) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if scheduler == "constant" else scheduler
    [factor] = get_scheduler(
        name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=40
    ).lr_lambdas
    expected = [factor(step) for step in range(40)]
    assert rates(40, lr_scheduler=scheduler, warmup_steps=warmup_steps) == pytest.approx(expected)
    by_epoch = [0.85**epoch for epoch in range(3) for _ in range(10)]
    assert rates(30, lr_scheduler="step", gamma=0.85) == pytest.approx(by_epoch)


def test_minimum_rate_and_warmup_ratio_equal_those_of_transformers() -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    more = {"min_lr": 0.1}
    least = get_scheduler("cosine_with_min_lr", optimizer, 4, 40, scheduler_specific_kwargs=more)
    [factor] = least.lr_lambdas
    found = rates(40, lr_scheduler="cosine", warmup_ratio=0.1, min_lr=0.1)
    assert found == pytest.approx([factor(step) for step in range(40)])


@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("min_lr", [0.0, 0.1])
def test_stable_and_inverse_square_root_rates_are_those_of_transformers(
    warmup_steps: int, min_lr: float
) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    more = {"num_decay_steps": 8, "min_lr_ratio": min_lr}
    wsd = get_scheduler(
        "warmup_stable_decay", optimizer, warmup_steps, 40, scheduler_specific_kwargs=more
    )
    settings = {"lr_scheduler": "warmup_stable_decay", "decay_ratio": 0.2, "min_lr": min_lr}
    found = rates(40, warmup_steps=warmup_steps, **settings)
    # Transformers' warm-up begins at min_lr here, unlike in all of its other schedules.
    expected = [wsd.lr_lambdas[0](step) for step in range(40)]
    assert found[warmup_steps:] == pytest.approx(expected[warmup_steps:])
    assert found[:warmup_steps] == pytest.approx([step / 5 for step in range(warmup_steps)])
    inverse = get_scheduler("inverse_sqrt", optimizer, warmup_steps, 40)
    found = rates(40, warmup_steps=warmup_steps, lr_scheduler="inverse_sqrt")
    assert found == pytest.approx([inverse.lr_lambdas[0](step) for step in range(40)])


def test_a_decay_as_long_as_the_run_begins_after_the_warmup() -> None:
    found = rates(10, lr_scheduler="warmup_stable_decay", decay_ratio=1.0, warmup_steps=5)
    assert found[5:] == pytest.approx([(1 + math.cos(math.pi * n / 5)) / 2 for n in range(5)])


@pytest.mark.parametrize(("total", "steps"), [(1, 0), (20, 2), (21, 20)])
def test_a_warmup_as_long_as_the_run_becomes_a_tenth_of_it(total: int, steps: int) -> None:
    found = rates(total, lr_scheduler="constant", warmup_steps=20)
    assert found[steps:] == [1.0] * (total - steps)
    assert all(rate < 1 for rate in found[:steps])


def test_lora_plus_has_the_groups_of_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    from tiny_llama import tiny_llama

    model = get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear"))
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-4, loraplus_lr_ratio=16)
    ours = build_optimizer(model, TrainConfig(lr=1e-4, loraplus_lr_ratio=16))
    set_learning_rate(ours, 1e-4)
    expected = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    assert {id(p): group["lr"] for group in ours.param_groups for p in group["params"]} == expected
    assert len(set(expected.values())) == 2


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_betas_and_epsilon_reach_the_update(name: str) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    own = TrainConfig(optimizer=name, lr=0.1, adam_beta1=0.5, adam_beta2=0.7, adam_epsilon=0.1)
    optimizer = build_optimizer(torch.nn.ParameterList([ours]), own)
    expected = torch.optim.AdamW([theirs], lr=0.1, betas=(0.5, 0.7), eps=0.1, weight_decay=0)
    for slope in (0.3, -0.1, 0.5):
        for parameter, one in ((ours, optimizer), (theirs, expected)):
            parameter.grad = torch.full((4,), slope)
            one.step()
    assert torch.allclose(ours, theirs, rtol=1e-5)


def test_norms_and_biases_are_not_decayed_and_frozen_weights_not_optimized() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    model[2].requires_grad_(False)
    model.experts_bias = torch.nn.Parameter(torch.zeros(2, 2))  # one row per expert
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.1))
    decayed, spared = optimizer.param_groups
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [p.shape for p in spared["params"]] == [(2, 2), (4,), (4,), (4,)]
    assert spared["weight_decay"] == 0


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of optimizers_and_dump.py on two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("optimizers")
    finished = forked(Path(__file__).parent / "optimizers_and_dump.py", folder, ranks=2)
    assert finished.exit_code == 0, finished.output
    return folder


def reference(make: Callable[..., torch.optim.Optimizer], case: str) -> dict[str, torch.Tensor]:
    """The same steps with somebody else's optimizer in fp32 in one process."""
    model, _ = build(case, None)
    model.float()
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    train(model, make(groups, lr=LR), range(STEPS))
    return whole(model)


def largest_error(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str
) -> float:
    """The largest mean error over the parameters, as a part of how far they moved."""
    start = whole(build(case, None)[0])
    moved = {name: (expected[name] - start[name]).abs().mean() for name in expected}
    return max(
        float((found[name] - expected[name]).abs().mean() / moved[name]) for name in expected
    )


@pytest.mark.parametrize(
    ("case", "make", "of_torch", "of_two_ranks"),
    [
        ("AdamW", torch.optim.AdamW, 1e-5, 1e-5),
        ("SGD", torch.optim.SGD, 1e-5, 1e-5),
        ("momentum", partial(torch.optim.SGD, momentum=0.9), 1e-5, 1e-5),
        ("Adafactor", torch.optim.Adafactor, 1e-5, 1e-5),
        ("AdamW8bit", torch.optim.AdamW, 0.03, 0),
        # of the parameter with one element; with 40 seeds 0.02 in the median, 0.07 at most
        ("anyprecision", torch.optim.AdamW, 0.1, 0.1),
        ("RMSprop", FOREIGN["RMSprop"], 1e-5, 1e-5),
        ("Lion", Lion, 1e-5, 0),
    ],
)
def test_sharded_optimizers_equal_torchs_and_resume_on_one_process(
    launch: Path, runtime: Ranks, case: str, make: Any, of_torch: float, of_two_ranks: float
) -> None:
    end = torch.load(launch / f"{case}.pt")["end"]
    assert largest_error(end, reference(make, case), case) < of_torch
    assert largest_error(resumed(case, launch / case, runtime), end, case) <= of_two_ranks


def test_eight_bit_states_are_bit_identical_to_those_of_bitsandbytes(launch: Path) -> None:
    """Where its blocks end with the row, that is; and a single row is one for both."""
    from bitsandbytes.optim import AdamW8bit

    found = torch.load(launch / "AdamW8bit.pt")["end"]
    expected = reference(AdamW8bit, "AdamW8bit")
    for name in ("weights.blocks", "weights.one_row", "weights.bias", "weights.single"):
        assert torch.equal(found[name], expected[name]), name
    assert not torch.equal(found["weights.ragged"], expected["weights.ragged"]), (
        "blocks across rows differ"
    )


@pytest.mark.parametrize("case", CASES)
def test_a_restored_optimizer_resumes_bit_for_bit_and_replicas_stay_equal(
    launch: Path, case: str
) -> None:
    result = torch.load(launch / f"{case}.pt")
    first, second = result["copies"]
    for one, other in ((result["again"], result["end"]), (first, second)):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_compensated_bf16_weights_follow_fp32_weights_and_plain_bf16_does_not() -> None:
    """Steps of 1e-5 on weights around 1, whose bf16 neighbours are 0.004 and 0.008 away."""
    steps = 100
    lr = 1e-5
    generator = torch.Generator().manual_seed(0)
    start = (torch.rand(4096, generator=generator) + 0.5).bfloat16()
    exact, plain, kahan, stochastic = (torch.nn.Parameter(start.clone()) for _ in range(4))
    exact.data = exact.data.float()
    optimizers = [
        torch.optim.AdamW([exact], lr=lr, weight_decay=0.0),
        torch.optim.AdamW([plain], lr=lr, weight_decay=0.0),
        AnyPrecisionAdamW([kahan], lr=lr, use_kahan_summation=True),
        AnyPrecisionAdamW([stochastic], lr=lr),
    ]
    for _ in range(steps):
        slope = torch.rand(4096, generator=generator) + 0.5
        for weight, optimizer in zip((exact, plain, kahan, stochastic), optimizers, strict=True):
            weight.grad = slope.to(weight.dtype)
            optimizer.step()
    moved = (exact - start.float()).mean().item()
    assert moved == pytest.approx(-steps * lr, rel=0.05)
    assert torch.equal(plain, start)
    held = kahan.float() + optimizers[2].state[kahan]["compensation"].float()
    assert (held - exact).abs().mean().item() < 0.05 * abs(moved)
    assert (stochastic.float() - start.float()).mean().item() == pytest.approx(moved, rel=0.15)


def test_noise_is_uniform_in_int16_and_independent_between_its_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    like = torch.empty(999, 1001)  # not a multiple of 8
    noises = anyprecision._draw_noises(like, 3, generator)
    again = anyprecision._draw_noises(like, 3, torch.Generator().manual_seed(0))
    assert torch.equal(noises, again)
    count = like.numel()
    for noise in noises:
        assert noise.shape == like.shape and noise.dtype == torch.int16
        assert noise.data_ptr() % 16 == 0
        assert (noise.min(), noise.max()) == (-(2**15), 2**15 - 1)
        for bit in range(16):
            share = ((noise.int() >> bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 5 * 0.5 / count**0.5
        expected = count / 256
        found = torch.bincount((noise.flatten().int() + 2**15) >> 8, minlength=256)
        chi_square = ((found - expected) ** 2 / expected).sum().item()
        assert chi_square < 255 + 5 * (2 * 255) ** 0.5
    table = torch.stack([noise.flatten().double() for noise in noises])
    neighbors = torch.stack([table[0][:-1], table[0][1:]])
    for values in (table, neighbors):
        others = torch.corrcoef(values) - torch.eye(len(values))
        assert others.abs().max().item() < 5 / count**0.5


def test_stochastic_rounding_is_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([1.0 + 1 / 1024, -3.0 - 1 / 100, 1e-30, 0.7]).expand(400_000, 4)
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    (noise,) = anyprecision._draw_noises(exact, 1, generator)
    anyprecision.round_stochastically(rounded, exact.contiguous(), noise)
    error = rounded.double().mean(0) / exact[0].double() - 1
    spacing = 2**-7  # at most, of neighboring bf16 numbers
    assert error.abs().max().item() < 5 * spacing / 2 / 400_000**0.5


def three_steps(dtype: torch.dtype) -> list[torch.Tensor]:
    """Weights of several pieces, of no whole row and of none, and their states, after three
    steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (0, 768, 896, 7)
    ]
    optimizer = AnyPrecisionAdamW([{"params": weights, "weight_decay": 0.1}], lr=1e-3)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    return [*weights, *(state for weight in weights for state in optimizer.state[weight].values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_update_for_any_number_of_rows_gives_the_same_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anyprecision, "PIECE", 512)
    expected = three_steps(dtype)
    graphs = []
    monkeypatch.setattr(one_kernel, "runs_compiled", lambda _: True)

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    update = one_kernel.OneKernel(anyprecision._update_piece)
    update._compiled = torch.compile(anyprecision._update_piece, backend=count, fullgraph=True)
    monkeypatch.setattr(anyprecision, "_update_in_one_pass", update)
    torch._dynamo.reset()
    for found, value in zip(three_steps(dtype), expected, strict=True):
        torch.testing.assert_close(found, value)  # dynamo's graph has addcmul as one fma
    assert len(graphs) == 3, "4 rows; any number of rows; 7 elements"
    widths = set[int]()
    for graph in graphs[:2]:
        inputs = [node for node in graph.graph.nodes if node.type is torch.Tensor]
        shapes = [node.meta["example_value"].shape for node in inputs]
        widths |= {shape[1] for shape in shapes if len(shape) == 2}
    assert widths == {128}


def test_if_compiling_fails_the_update_runs_uncompiled_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = three_steps(torch.bfloat16)

    def without_triton(*_: object, **__: object) -> None:
        raise RuntimeError("Cannot find a working triton installation.")

    monkeypatch.setattr(one_kernel, "runs_compiled", lambda _: True)
    monkeypatch.setattr(torch, "compile", without_triton)
    monkeypatch.setattr(one_kernel.log, "propagate", True)
    monkeypatch.setattr(
        anyprecision, "_update_in_one_pass", one_kernel.OneKernel(anyprecision._update_piece)
    )
    assert all(map(torch.equal, three_steps(torch.bfloat16), expected))
    assert [record.message for record in caplog.records if "triton" in record.message] == [
        "torch.compile: _update_piece runs uncompiled and slower (Cannot find a working triton installation)."
    ]
