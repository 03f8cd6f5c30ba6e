"""Losses over pairs against their formulas, written here on the logits of each response by
itself."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import tiny_llama
from torch.nn.functional import logsigmoid
from transformers import LlamaForCausalLM

from llama_ft.config import Config, PeftConfig, PreferenceConfig
from llama_ft.data import Batch
from llama_ft.models import BuiltModel, use_chunked_loss, use_packed_attention
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.training import build_objective
from llama_ft.training.objectives.base import logged_means
from llama_ft.training.objectives.reference import AdapterOff, StoredReference

# Chosen and rejected of two prompts of two tokens.
EXAMPLES = [[1, 5, 9, 30, 2], [1, 5, 7, 8], [4, 6, 2], [4, 6, 11, 12, 13, 2]]
PROMPT = 2
# The batch of a rank that has none.
FILLER = Batch(torch.tensor([[1, 5, 9]]), torch.full((1, 3), -100), [3], False, [])
DPO = {"objective": "dpo", "beta": 0.3}
IPO = {"objective": "ipo", "beta": 0.3}
SIMPO = {"objective": "simpo", "beta": 2.0, "simpo_gamma": 0.7}
CASES = [DPO, {**DPO, "dpo_label_smoothing": 0.2}, IPO, SIMPO,
         {**DPO, "rpo_alpha": 0.6}, {**SIMPO, "rpo_alpha": 0.6},
         {"objective": "orpo", "beta": 0.4},
         {"objective": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return made(0)


@pytest.fixture(scope="module")
def frozen() -> LlamaForCausalLM:
    """The reference of a model that is trained in full: as far as it may be from that."""
    return made(1)


def made(seed: int) -> LlamaForCausalLM:
    return tiny_llama(seed, num_attention_heads=2, vocab_size=50, initializer_range=0.3)


def batch(is_packed: bool, objective: str = "dpo") -> Batch:
    tokens = EXAMPLES
    if objective == "kto":
        examples = [(example, PROMPT) for example in EXAMPLES]
        tokens = []
        for (example, _), (other, _) in zip(examples, mismatched(examples), strict=True):
            tokens += [example, other]
    labels = [[-100] * PROMPT + example[PROMPT:] for example in tokens]
    lengths = [len(example) for example in tokens]
    sources = ["x"] * len(tokens)
    desirable: Any = [True, None, False, None] * 2 if objective == "kto" else [None] * len(tokens)
    if is_packed:
        return Batch(
            torch.tensor([sum(tokens, [])]),
            torch.tensor([sum(labels, [])]),
            lengths,
            True,
            sources,
            desirable,
        )
    padded_ids = torch.tensor([ids + [0] * (7 - len(ids)) for ids in tokens])
    padded_labels = torch.tensor([ids + [-100] * (7 - len(ids)) for ids in labels])
    return Batch(padded_ids, padded_labels, lengths, False, sources, desirable)


def method(settings: dict[str, Any], stored: StoredReference | None = None) -> Any:
    # a new adapter: its reference is the model with the adapter off
    config = Config(preference=PreferenceConfig(**settings), peft=PeftConfig(use_peft=True))
    objective: Any = build_objective(config)
    if stored is not None and objective.reference is not None:  # simpo and orpo have none
        objective.reference = stored
    return objective


def mismatched(examples: list[tuple[list[int], int]]) -> list[tuple[list[int], int]]:
    """Each prompt with the response that stands half the list further."""
    others = examples[len(examples) // 2 :] + examples[: len(examples) // 2]
    return [
        (example[:start] + other[begin:], start)
        for (example, start), (other, begin) in zip(examples, others, strict=True)
    ]


def divergence(examples: list[tuple[list[int], int]], model: Any, reference: Any) -> torch.Tensor:
    differences = []
    with torch.no_grad():
        for example in mismatched(examples):
            ours = log_probabilities(model, *example).sum()
            theirs = log_probabilities(reference, *example).sum()
            differences.append(ours - theirs)
    return torch.stack(differences).mean().clamp(min=0)


def log_probabilities(model: Any, example: list[int], start: int = PROMPT) -> torch.Tensor:
    found = model(input_ids=torch.tensor([example])).logits[0].log_softmax(-1)
    return torch.stack([found[place - 1, example[place]] for place in range(start, len(example))])


def expected(
    examples: list[tuple[list[int], int]],
    model: Any,
    reference: Any,
    beta: float,
    objective: str,
    **more: float,
) -> tuple[Any, list[Any]]:
    """The sum of the losses of the pairs as TRL's trainers have them, one pair a micro-batch, and
    the rewards. `examples`: tokens and where the response begins, chosen and rejected in turn. With kto
    all are one micro-batch."""
    losses = []
    rewards = list[Any]()
    kl = divergence(examples, model, reference) if objective == "kto" else 0
    for chosen, rejected in zip(examples[::2], examples[1::2], strict=True):
        ours = [log_probabilities(model, *example) for example in (chosen, rejected)]
        theirs = [log_probabilities(reference, *example).detach() for example in (chosen, rejected)]
        # log-ratios of the chosen and of the rejected response
        c = ours[0].sum() - theirs[0].sum()
        r = ours[1].sum() - theirs[1].sum()
        if objective in ("simpo", "orpo"):
            c = ours[0].mean()
            r = ours[1].mean()
        if objective == "dpo":
            s = more.get("dpo_label_smoothing", 0)
            loss = -logsigmoid(beta * (c - r)) * (1 - s) - logsigmoid(-beta * (c - r)) * s
        elif objective == "kto":
            desirable = more["desirable_weight"] * (1 - torch.sigmoid(beta * (c - kl)))
            undesirable = more["undesirable_weight"] * (1 - torch.sigmoid(beta * (kl - r)))
            loss = desirable + undesirable
        elif objective == "ipo":
            loss = (c / len(ours[0]) - r / len(ours[1]) - 1 / (2 * beta)) ** 2
        elif objective == "simpo":
            loss = -logsigmoid(beta * (c - r - more["simpo_gamma"] / beta))
        else:
            odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
            loss = -log_probabilities(model, chosen[0], 1).mean() - beta * logsigmoid(odds)
        losses.append(loss - more.get("rpo_alpha", 0) * ours[0].mean())
        rewards.append((beta * c, beta * r))
    return torch.stack(losses).sum(), rewards


# Each pair of two of the three.
@pytest.mark.parametrize(
    ("has_adapter", "is_packed", "in_chunks"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
)
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_losses_rewards_and_gradients_equal_the_formulas(
    model: LlamaForCausalLM,
    frozen: LlamaForCausalLM,
    runtime: Any,
    settings: Any,
    has_adapter: bool,
    is_packed: bool,
    in_chunks: bool,
) -> None:
    theirs = copy.deepcopy(model)
    reference = model
    stored = None
    is_kto = settings["objective"] == "kto"
    if not has_adapter:
        reference = frozen
        stored = StoredReference()
        # In another layout.
        stored.compute(
            BuiltModel(copy.deepcopy(frozen)), [batch(False, settings["objective"])], runtime
        )
    if has_adapter:
        torch.manual_seed(1)
        get_peft_model(theirs, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(
                    parameter, std=0.2, generator=torch.Generator().manual_seed(len(name) + 1)
                )
    ours = copy.deepcopy(theirs).train()
    use_fused_lora(ours)
    trained = [name for name, parameter in ours.named_parameters() if parameter.requires_grad]
    loss, rewards = expected(
        [(example, PROMPT) for example in EXAMPLES], theirs, reference, **settings
    )
    loss.backward()
    built = BuiltModel(ours)
    if is_packed:
        built.mixers = use_packed_attention(built)
    built.has_chunked_loss = in_chunks and use_chunked_loss(built)
    assert built.has_chunked_loss == in_chunks
    summed = method(settings, stored).loss(built, batch(is_packed, settings["objective"]), runtime)
    summed.loss.backward()
    assert summed.count == (4 if is_kto else 2)
    torch.testing.assert_close(summed.loss, loss, rtol=1e-5, atol=1e-5)
    chosen, rejected = (sum(rewards) for rewards in zip(*rewards, strict=True))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(summed.logged["rewards/chosen"], chosen)
    close(summed.logged["rewards/rejected"], rejected)
    if is_kto:
        kl = divergence([(example, PROMPT) for example in EXAMPLES], theirs, reference)
        assert kl > 0.1 or not has_adapter
        assert summed.logged["count/chosen"] == summed.logged["count/rejected"] == 2
        torch.testing.assert_close(summed.logged["kl"], kl * 4, rtol=1e-5, atol=1e-5)
    else:
        assert summed.logged["rewards/accuracies"] == sum(c > r for c, r in rewards)
    assert trained == [name for name, weight in ours.named_parameters() if weight.requires_grad]
    for (name, mine), parameter in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (parameter.grad is None), name
        if mine.grad is not None:
            # of the tensor's largest gradient: those of ipo, a square, are large
            largest = parameter.grad.abs().max().item()
            atol = 1e-5 * max(2.0, largest)
            torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_rank_without_pairs_adds_nothing(
    model: LlamaForCausalLM, runtime: Any, settings: Any
) -> None:
    """It logs the same numbers, since the ranks add them up together."""
    ours = copy.deepcopy(model)
    objective = method(settings)
    built = BuiltModel(ours)
    usual = objective.loss(built, batch(False, settings["objective"]), runtime)
    summed = objective.loss(built, FILLER, runtime)
    summed.loss.backward()
    assert summed.count == summed.loss.item() == 0
    assert summed.logged.keys() == usual.logged.keys()
    assert not any(value.item() for value in summed.logged.values())
    assert not any(parameter.grad.any() for parameter in ours.parameters())


def test_the_reference_has_neither_adapter_nor_dropout(
    model: LlamaForCausalLM, runtime: Any
) -> None:
    """With B zero both are the same model: only dropout in training makes a difference."""
    ours = copy.deepcopy(model)
    ours.config.attention_dropout = 0.5
    get_peft_model(ours, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    objective = method(DPO)
    reference = AdapterOff()
    built = BuiltModel(ours)
    ours.train()
    noisy = objective.loss(built, batch(False), runtime)
    assert ours.training
    assert noisy.logged["rewards/margins"].item() != 0  # of the policy alone
    ours.eval()
    still = objective.loss(built, batch(False), runtime)
    assert not ours.training
    assert still.logged["rewards/margins"].item() == 0
    ours.train()
    with torch.no_grad():
        assert reference.log_probabilities(built, batch(False), runtime).tolist() == pytest.approx(
            [log_probabilities(model, example).sum().item() for example in EXAMPLES], rel=1e-5
        )


def test_means_over_desirable_and_undesirable_completions_have_their_own_counts() -> None:
    sums = {
        "loss": 8.0,
        "kl": 2.0,
        "rewards/chosen": 6.0,
        "rewards/rejected": 1.0,
        "logps/rejected": -5.0,
    }
    counts = {"count/chosen": 3.0, "count/rejected": 1.0}
    means = {
        "loss": 2.0,
        "kl": 0.5,
        "rewards/chosen": 2.0,
        "rewards/rejected": 1.0,
        "logps/rejected": -5.0,
    }
    assert logged_means(sums | counts, 4) == means | {"rewards/margins": 1.0}
    alone = logged_means(sums | {"count/chosen": 4.0, "count/rejected": 0.0}, 4)
    assert alone == {"loss": 2.0, "kl": 0.5, "rewards/chosen": 1.5}
