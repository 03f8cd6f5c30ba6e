"""Groups of parameters by name, and optimizers of users' files, against loops and optimizers that are
written by hand."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, losses, run_cases
from forked import forked
from plain_losses import loss_tokens, read_jsonl, sample_loss, write_tokenized
from safetensors.torch import load_file
from torch import nn

from llama_ft.config import TrainConfig
from llama_ft.data import Batch
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, freeze_groups, use_chunked_loss
from llama_ft.runtime import Ranks
from llama_ft.training import (
    SupervisedFineTuning,
    build_optimizer,
    check_own_optimizer,
    set_learning_rate,
)
from llama_ft.training.optimizer import parameter_groups

RECIPE = REPOSITORY / "recipes" / "finetuning.py"
MUON = REPOSITORY / "examples" / "muon.py"
LR = 2e-3
STEPS = 4
GROUPS = (
    "[{match: embed_tokens, lr: 0.1x}, {match: 'layers.0.*norm', weight_decay: 0.3}, "
    "{match: 'layers[.]1[.]mlp', freeze: true}, {match: lm_head, lr: 0.0005, weight_decay: 0}]"
)
PLAIN = f"--precision fp32 --lr {LR} --weight_decay 0.1 --batching_strategy padding --save_dtype float32"


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with groups and with Muon: whole ones, and ones that are resumed after half of their
    steps."""
    folder = tmp_path_factory.mktemp("groups")
    write_tokenized(folder / "one.jsonl", [30], seed=1)
    write_tokenized(folder / "many.jsonl", range(8, 24), seed=2)
    (folder / "groups.yaml").write_text(f"train:\n  groups: {GROUPS}\n")
    common = [*PLAIN.split(), "--model_name", str(tiny_model), "--max_train_step", str(STEPS)]
    common += ["--lr_scheduler", "linear", "--num_epochs", str(STEPS), "--save_steps", "2"]
    one = [*common, "--dataset", f"{folder}/one.jsonl", "--batch_size_training", "1"]
    many = [*common, "--dataset", f"{folder}/many.jsonl", "--batch_size_training", "16"]
    many += ["--optimizer", f"{MUON}:muon"]

    def again(run: str) -> list[str]:
        checkpoint = folder / run / "checkpoints" / "step-000002"
        return ["--output_dir", f"{folder}/{run}-again", "--resume", str(checkpoint)]

    cases = [
        [*one, "--groups", GROUPS, "--output_dir", f"{folder}/groups"],
        [*one, "--config", f"{folder}/groups.yaml", *again("groups")],
        [*many, "--output_dir", f"{folder}/muon"],
        [*many, *again("muon")],
    ]
    run_cases(folder, cases)
    two = [*many, "--enable_fsdp", "--batch_size_training", "8"]
    (folder / "two").mkdir()
    run_cases(folder / "two", [[*two, "--output_dir", f"{folder}/muon-two"]], ranks=2)
    return folder


def trained(run: Path) -> dict[str, torch.Tensor]:
    tensors = dict[str, torch.Tensor]()
    for file in (run / "model").glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def loop(model: Path, samples: Path, ranks: Ranks) -> tuple[list[float], Any]:
    """A loop of torch as anyone writes it, with the recipe's loss: its losses, and the trained
    model. Each group has its own peak."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    built = BuiltModel(plain)
    built.has_chunked_loss = use_chunked_loss(built)
    own = groups_by_hand(plain)
    peaks = [group["lr"] for group in own]
    optimizer = torch.optim.AdamW(own, fused=True)
    [example] = read_jsonl(samples)
    ids, labels = (torch.tensor([example[key]]) for key in ("input_ids", "labels"))
    batch = Batch(ids, labels, [ids.shape[1]], False, [""])
    found = []
    for step in range(STEPS):
        summed = SupervisedFineTuning().loss(built, batch, ranks)
        (summed.loss / loss_tokens(example)).backward()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        found.append(summed.loss.item() / loss_tokens(example))
    return found, plain


def groups_by_hand(model: Any) -> list[dict[str, Any]]:
    """The same groups without regular expressions."""
    layers = model.model.layers
    layers[1].mlp.requires_grad_(False)
    norms = [layers[0].input_layernorm.weight, layers[0].post_attention_layernorm.weight]
    vectors = [
        layers[1].input_layernorm.weight,
        layers[1].post_attention_layernorm.weight,
        model.model.norm.weight,
    ]
    matrices = [*layers[0].self_attn.parameters(), *layers[0].mlp.parameters()]
    matrices += layers[1].self_attn.parameters()
    embedding = [model.model.embed_tokens.weight]
    return [
        {"params": embedding, "lr": 0.1 * LR, "weight_decay": 0.1},
        {"params": norms, "lr": LR, "weight_decay": 0.3},
        {"params": [model.lm_head.weight], "lr": 0.0005, "weight_decay": 0.0},
        {"params": matrices, "lr": LR, "weight_decay": 0.1},
        {"params": vectors, "lr": LR, "weight_decay": 0.0},
    ]


def test_groups_equal_a_loop_of_torch_with_the_same_groups(
    folder: Path, tiny_model: Path, runtime: Ranks
) -> None:
    expected, model = loop(tiny_model, folder / "one.jsonl", runtime)
    assert losses(folder / "groups") == expected
    found = trained(folder / "groups")
    wrong = [
        name for name, value in model.named_parameters() if not torch.equal(found[name], value)
    ]
    assert not wrong


def test_runs_with_groups_and_with_muon_resume_bit_for_bit(folder: Path) -> None:
    for run in ("groups", "muon"):
        expected = trained(folder / run)
        found = trained(folder / f"{run}-again")
        assert losses(folder / f"{run}-again") == losses(folder / run)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_muon_of_a_users_file_equals_torchs_optimizers_on_one_and_two_ranks(
    folder: Path, tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    named = dict(plain.named_parameters())
    matrices = [value for name, value in named.items() if value.ndim == 2 and "layers" in name]
    tables = [plain.model.embed_tokens.weight, plain.lm_head.weight]
    vectors = [value for value in named.values() if value.ndim == 1]
    decays = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decays, lr=LR),
    ]
    examples = read_jsonl(folder / "many.jsonl")
    targets = sum(loss_tokens(example) for example in examples)
    expected = []
    for step in range(STEPS):
        total = 0.0
        for example in examples:
            loss = sample_loss(plain, example) / targets
            loss.backward()
            total += loss.item()
        expected.append(total)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 - step / STEPS)
            optimizer.step()
            optimizer.zero_grad()
    assert losses(folder / "muon") == pytest.approx(expected, rel=1e-4)
    assert losses(folder / "muon-two") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.02


def test_resume_rejects_other_groups(folder: Path, tiny_model: Path) -> None:
    checkpoint = folder / "groups" / "checkpoints" / "step-000002"
    flags = f"--config {folder}/groups/config.yaml --resume {checkpoint} --output_dir {folder}/no"
    other = GROUPS.replace("0.1x", "0.2x")
    finished = forked(RECIPE, *flags.split(), "--groups", other, "--no_plan")
    assert finished.exit_code == 2
    assert "--groups is" in finished.output and "--resume_allow_changes groups" in finished.output
    assert "Traceback" not in finished.output and not (folder / "no").exists()


class Tied(nn.Module):
    """A table under two names, a matrix and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.inner = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_in_a_group_by_each_of_its_names() -> None:
    model = Tied()
    train = TrainConfig(lr=1.0, weight_decay=0.5, groups=[{"match": "^head", "lr": "0.25x"}])
    groups = parameter_groups(model, train)
    shapes = [[tuple(p.shape) for p in group["params"]] for group in groups]
    assert shapes == [[(3, 3)], [(3,), (3,), (3,)], [(4, 3)]]
    assert [group["lr_ratio"] for group in groups] == [1.0, 1.0, 0.25]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0, 0.5]
    freeze_groups(model, [{"match": "^head", "freeze": True}])
    assert not model.embed.weight.requires_grad


@pytest.mark.parametrize("name", ["AdamW", "anyprecision", "AdamW8bit", "SGD", "Adafactor"])
def test_a_group_is_trained_as_by_an_optimizer_of_its_own(name: str) -> None:
    """Two optimizers without groups, each with a learning rate and weight decay, against one."""
    groups: Any = [{"match": "inner.weight", "lr": "0.1x", "weight_decay": 0}]
    torch.manual_seed(0)
    together = nn.ModuleDict({"inner": nn.Linear(64, 96), "outer": nn.Linear(96, 64)})
    apart = copy.deepcopy(together)
    settings: Any = {"optimizer": name, "lr": 0.02, "weight_decay": 0.1}
    optimizer = build_optimizer(together, TrainConfig(**settings, groups=groups))
    slow = nn.ModuleDict({"slow": nn.ParameterDict({"weight": apart["inner"].weight})})
    fast = nn.ModuleDict({"outer": apart["outer"], "bias": nn.ParameterList([apart["inner"].bias])})
    own = [
        (0.002, build_optimizer(slow, TrainConfig(optimizer=name, lr=0.002))),
        (0.02, build_optimizer(fast, TrainConfig(**settings))),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for left, right in zip(together.parameters(), apart.parameters(), strict=True):
            left.grad = torch.randn(left.shape, generator=generator)
            right.grad = left.grad.clone()
        set_learning_rate(optimizer, 0.02)
        optimizer.step()
        for rate, one in own:
            set_learning_rate(one, rate)
            one.step()
    # anyprecision rounds its states by random numbers, which depend on the order of the parameters
    tolerance = 5e-4 if name == "anyprecision" else 1e-7
    for left, right in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "lm_head", "lr": "2x"}], '"lm_head" matches no parameter. Trained are'),
        ([{"match": "norm", "lr": "2x"}], '"norm" matches only frozen parameters: norm.weight'),
        (
            [{"match": "embed", "lr": "2x"}, {"match": "head", "lr": "3x"}],
            'head.weight matches "embed" and "head"',
        ),
        ([{"match": "", "freeze": True}], "every parameter is frozen"),
    ],
)
def test_groups_without_effect_are_errors(groups: Any, message: str) -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    with pytest.raises(UserError) as raised:
        freeze_groups(model, groups)
    assert message in str(raised.value)


OWN = """
import torch
def good(groups):
    assert [name for name, _ in groups[0]["params"]] == ["embed.weight", "inner.weight"]
    return torch.optim.RMSprop(groups)
def nothing(groups): pass
def fails(groups): raise KeyError("lr")
def part(groups): return torch.optim.SGD(groups[:1])
def other(groups): return torch.optim.SGD([*groups, {"params": [("x", torch.zeros(2))]}])
def negative(groups):
    optimizer = torch.optim.SGD(groups)
    optimizer.param_groups[1]["lr"] = float("nan")
    return optimizer
def again(groups):
    return torch.optim.LBFGS([parameter for group in groups for _, parameter in group["params"]])
def faster(groups): return torch.optim.SGD([{**groups[0], "lr": 0.3}, groups[1]])
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "returned a NoneType; expected a torch.optim.Optimizer"),
        ("fails", "own.py:7: fails: KeyError: 'lr'"),
        ("part", "its optimizer lacks inner.bias, norm.weight, norm.bias"),
        ("other", "has parameters that are not in the groups"),
        ("absent", "LookupError: no such function"),
        ("negative", "a group has lr nan; expected a learning rate of at least 0"),
        ("again", "LBFGS computes the loss several times per step, which is not supported"),
    ],
)
def test_a_wrong_optimizer_is_an_error_before_weights_are_loaded(
    function: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(UserError) as raised:
        check_own_optimizer(model, TrainConfig(optimizer=f"{tmp_path}/own.py:{function}"))
    assert message in str(raised.value)


def test_the_schedule_multiplies_the_rates_that_a_function_sets(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    for function, rates in (("good", [0.05, 0.05]), ("faster", [0.15, 0.05])):
        optimizer = build_optimizer(
            Tied(), TrainConfig(lr=0.1, optimizer=f"{tmp_path}/own.py:{function}")
        )
        set_learning_rate(optimizer, 0.05)  # half of the peak
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
