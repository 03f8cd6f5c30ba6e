"""Several ranks share a packed sequence: losses and gradients are those of each sample alone, computed
in one process by Transformers' own attention."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from forked import forked
from models.packing import shared_sequences_job as job
from packaging.version import Version
from torch.nn import functional
from transformers import AutoModelForCausalLM

from llama_ft.data import Batch
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, use_packed_attention
from llama_ft.models.packing.packed_samples import TokenMixers
from llama_ft.models.packing.shared_sequences import OwnTokens
from llama_ft.runtime.sequence import SequenceRank, share_sequences
from llama_ft.training.objectives.base import model_call
from recipes import shared_step_job

FAST = ("llama", "gemma 3", "sinks", "latent attention", "longrope", "routers", "delta nets")
COMPILED = [f"{case}{job.COMPILED}" for case in ("llama", "gemma 3", "latent attention")]
SIMPO = "llama by simpo"
CPU = torch.device("cpu")
# Sums over all tokens in another order: of the largest gradient of a tensor. Recurrences add rounding, and
# sinks are added by another formula than Transformers'.
TOLERANCE = {"sinks": 1e-5}
TOLERANCE |= {case: 2e-5 for case in job.CASES if case.startswith("delta nets")}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of ranks that share all sequences; with 4 ranks key heads are repeated."""
    folder = tmp_path_factory.mktemp("shared")
    cases = (*FAST, SIMPO) if request.param == 2 else (*job.CASES, SIMPO, *COMPILED)
    size = str(request.param)
    finished = forked(Path(job.__file__), folder, size, *cases, ranks=request.param, timeout=900)
    assert finished.exit_code == 0, finished.output
    return folder


def log_probabilities(case: str, batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """A model, and the log-probabilities of the targets of each sample alone."""
    model: Any = job.make(case).train()
    samples = []
    for ids, labels in batch.examples():
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        logits = model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
        is_target = labels[1:] != -100
        losses = functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")
        samples.append(-losses[is_target])
    return model, samples


def assert_gradients(found: dict[str, torch.Tensor], model: torch.nn.Module, case: str) -> None:
    tolerance = TOLERANCE.get(case, 2e-6)
    expected = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    compared = 0
    for name, gradient in expected.items():
        compared += 1
        # Without rounding, a key's bias has no gradient: all scores of a query change alike.
        of_scale = name.replace("k_proj.bias", "k_proj.weight")
        scale = expected[of_scale].abs().max().clamp(min=1e-2)
        assert (found[name] - gradient).abs().max() <= tolerance * scale, name
    assert compared > 10


@pytest.mark.parametrize(
    "case",
    [
        case if case in FAST else pytest.param(case, marks=pytest.mark.slow)
        for case in (*job.CASES, *COMPILED)
    ],
)
def test_losses_and_gradients_of_shared_sequences_are_those_of_each_sample_alone(
    case: str, launch: Path
) -> None:
    file = launch / f"{case}.pt"
    if not file.exists():
        pytest.skip("runs with 4 ranks")
    found = torch.load(file)
    model, samples = log_probabilities(case.removesuffix(job.COMPILED), job.make_batch())
    expected = -torch.cat(samples).sum()
    assert found["count"] == sum(map(len, samples))
    balance = 0.0
    if case == "routers":  # of all tokens, times the loss tokens
        balance = found["logged"]["router_aux_loss"] * job.make("routers").router_aux_loss_coef
        assert balance > 0
    else:
        expected.backward()
        assert_gradients(found["gradients"], model, case)
    assert found["loss"] - balance == pytest.approx(expected.item(), rel=2e-6)


def test_the_routers_loss_is_that_of_all_tokens_of_the_sequence(launch: Path) -> None:
    found = torch.load(launch / "routers.pt")
    model: Any = job.make("routers").train()
    batch = job.make_batch()
    layers: dict[int, list[torch.Tensor]] = {}
    for ids, _ in batch.examples():
        output = model(input_ids=ids[None], attention_mask=torch.ones(1, len(ids)), use_cache=False)
        for number, logits in enumerate(output.router_logits):
            layers.setdefault(number, []).append(logits)
    routed = torch.cat([torch.cat(parts) for parts in layers.values()]).softmax(-1)
    chosen = routed.topk(2, dim=-1).indices
    fractions = torch.bincount(chosen.flatten(), minlength=4) / len(routed)
    expected = (fractions * routed.mean(0)).sum().item() * 4
    assert found["logged"]["router_aux_loss"] / found["count"] == pytest.approx(expected, rel=1e-5)


def test_a_pair_loss_over_shared_sequences_is_that_of_the_whole_responses(launch: Path) -> None:
    found = torch.load(launch / f"{SIMPO}.pt")
    model, samples = log_probabilities("llama", job.pairs())
    assert [len(sample) for sample in samples] == [36, 19, 0, 43]
    means = [sample.sum() / max(1, len(sample)) for sample in samples]
    beta, gamma = 0.1, 0.5  # the defaults of beta and simpo_gamma
    chosen = torch.stack(means[::2])
    rejected = torch.stack(means[1::2])
    losses = -functional.logsigmoid(beta * (chosen - rejected) - gamma)
    losses.sum().backward()
    assert found["loss"] == pytest.approx(losses.sum().item(), rel=1e-6)
    assert found["count"] == 2
    assert found["logged"]["rewards/chosen"] == pytest.approx(beta * chosen.sum().item(), rel=1e-5)
    assert_gradients(found["gradients"], model, "llama")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [job.LENGTHS, job.LENGTHS[:4], *shared_step_job.LENGTHS])
def test_the_compared_sequences_are_cut_inside_of_samples(lengths: list[int], size: int) -> None:
    group: Any = None  # not asked
    batch = Batch(
        torch.zeros(1, sum(lengths), dtype=torch.int64),
        torch.zeros(1, sum(lengths), dtype=torch.int64),
        lengths,
        True,
        [""] * len(lengths),
    )
    built = BuiltModel(job.make("llama"))
    built.mixers = TokenMixers(built.model)
    built.mixers.sequence = SequenceRank(0, size, group)
    own_tokens = model_call(built, batch, CPU).inputs["input_ids"].shape[1]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    cuts = [own_tokens * rank for rank in range(1, size)]
    assert cuts[-1] < sum(lengths)  # every rank has tokens of samples
    assert not {*cuts} & {*ends}


def test_each_target_is_computed_by_one_rank() -> None:
    positions = torch.tensor([0, 5, 6, 9, 11])
    tokens = torch.zeros(1, 12)
    parts = []
    for rank in range(2):
        group: Any = None  # not asked
        at = OwnTokens.of(SequenceRank(rank, 2, group), tokens).find(positions, CPU)
        parts.append((at.numbers.tolist(), at.positions.tolist()))
    assert parts == [([0, 1], [0, 5]), ([2, 3, 4], [0, 3, 5])]


def test_tokens_that_fill_a_shared_sequence_up_are_not_counted() -> None:
    group: Any = None
    last = OwnTokens.of(SequenceRank(1, 2, group), torch.zeros(1, 12))
    assert last.mask(10, CPU).tolist() == [[True, True, True, True, False, False]]


NEEDS_MASKS = ("Bloom", "Falcon", "Mpt")
# From 5.24 on, GPT-J computes attention by the function that llama_ft replaces.
if Version(transformers.__version__) < Version("5.24"):
    NEEDS_MASKS = (*NEEDS_MASKS, "GPTJ")


@pytest.mark.parametrize("kind", NEEDS_MASKS)
def test_attention_that_needs_masks_is_a_user_error_before_weights_are_loaded(kind: str) -> None:
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")()
        layers = dict.fromkeys(("num_hidden_layers", "n_layer"), 2)
        config.update({name: value for name, value in layers.items() if hasattr(config, name)})
        built = BuiltModel(AutoModelForCausalLM.from_config(config))
    group: Any = None  # not asked
    ranks: Any = SimpleNamespace(sequence=SequenceRank(0, 1, group))
    with pytest.raises(UserError, match="needs masks of all pairs of tokens") as raised:
        use_packed_attention(built, ranks)
    assert kind in str(raised.value)


def test_ranks_that_cannot_be_divided_into_groups_are_a_user_error() -> None:
    expected = "--sequence_parallel_size 3: 4 ranks cannot be divided into groups of 3"
    with pytest.raises(UserError, match=expected):
        share_sequences("cpu", 4, 3)
