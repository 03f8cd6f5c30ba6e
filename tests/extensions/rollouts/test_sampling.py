"""Own generation, compared with forward passes of plain Transformers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import utils as generation

from llama_ft.data.batches.sampler import combine_seeds
from llama_ft.errors import RunFailure
from llama_ft.extensions.rollouts.rounds import Answer, Prompt
from llama_ft.extensions.rollouts.sampling import OwnSampler, Sampling
from llama_ft.inference.load import LoadedModel
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks

LATER = 3  # tokens
STOP = [7, 11, 30, 48]  # frequent enough in answers of a random model
PROMPTS = [
    Prompt(index, {}, "", "", ids)
    for index, ids in [(0, [0, 5, 40, 41]), (2, [0, 90]), (5, [0, *range(100, 120)])]
]
SAMPLING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_completion_length=24,
    stop_ids=STOP,
    num_generations=3,
    seed=42,
)


class Loaded:
    """A sampler for a tiny model, with what it needs."""

    def __init__(self, folder: Path, runtime: Ranks) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._runtime = runtime

    def sample(
        self, sampling: Sampling, batch_size: int = 8, prompts: Sequence[Prompt] = PROMPTS
    ) -> list[list[Answer]]:
        opened = LoadedModel(BuiltModel(self.model), self.tokenizer, "")
        return OwnSampler(opened, sampling, batch_size, self._runtime).sample(prompts, step=3)

    def logits(self, prompt: Prompt, answer: Answer) -> torch.Tensor:
        """Those of each token of an answer, by one forward pass: float64 [tokens, vocab]."""
        ids = [*prompt.token_ids, *answer.token_ids.tolist()]
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0].double()
        return logits[len(prompt.token_ids) - 1 : -1]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path, runtime: Ranks) -> Loaded:
    return Loaded(tiny_model, runtime)


def pairs(answers: list[list[Answer]]) -> list[tuple[Prompt, Answer]]:
    return [
        (prompt, answer) for prompt, group in zip(PROMPTS, answers, strict=True) for answer in group
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_those_of_a_forward_pass(
    loaded: Loaded, temperature: float
) -> None:
    for prompt, answer in pairs(loaded.sample(replace(SAMPLING, temperature=temperature))):
        logprobs = (loaded.logits(prompt, answer) / temperature).log_softmax(-1)
        ids = torch.from_numpy(answer.token_ids).long()
        expected = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).numpy()
        assert answer.logprobs.dtype == numpy.float32
        assert numpy.abs(answer.logprobs - expected).max() < 1e-5


def test_an_answer_does_not_depend_on_its_batch(loaded: Loaded) -> None:
    together = loaded.sample(SAMPLING, batch_size=9)
    for batch_size in (1, 4):
        others = loaded.sample(SAMPLING, batch_size)
        for (_, one), (_, other) in zip(pairs(together), pairs(others), strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert numpy.abs(one.logprobs - other.logprobs).max() < 1e-5
    alone = loaded.sample(SAMPLING, prompts=PROMPTS[1:2])[0]
    assert [one.token_ids.tolist() for one in alone] == [
        one.token_ids.tolist() for one in together[1]
    ]


def test_seeds_are_those_of_seed_step_prompt_and_number(loaded: Loaded) -> None:
    answers = loaded.sample(SAMPLING)
    for prompt, group in zip(PROMPTS, answers, strict=True):
        seeds = [combine_seeds(42, 3, prompt.index, number) for number in range(3)]
        assert [answer.seed for answer in group] == seeds
    texts = {answer.text for group in answers for answer in group}
    assert len(texts) == 9


def test_an_answer_ends_with_its_first_stop_token(loaded: Loaded) -> None:
    answers = [answer for _, answer in pairs(loaded.sample(SAMPLING))]
    assert {answer.has_ended for answer in answers} == {True, False}
    for answer in answers:
        ids = answer.token_ids.tolist()
        ends = [token in STOP for token in ids]
        assert not any(ends[:-1])
        assert ends[-1] == answer.has_ended
        assert answer.has_ended or len(ids) == 24
        before_end = ids[:-1] if answer.has_ended else ids
        assert answer.text == loaded.tokenizer.decode(before_end, skip_special_tokens=True)


def test_tokens_have_the_frequencies_of_the_distribution(loaded: Loaded) -> None:
    count = 4000
    one_token = replace(SAMPLING, max_completion_length=1, num_generations=count)
    [group] = loaded.sample(one_token, batch_size=count, prompts=PROMPTS[:1])
    probabilities = loaded.logits(PROMPTS[0], group[0])[0].softmax(-1)
    seen = Counter(int(answer.token_ids[0]) for answer in group)
    likely = probabilities.topk(40).indices.tolist()
    # Pearson's statistic; 99.9 % of samples of 40 frequencies are below 73
    statistic = 0.0
    for token in likely:
        expected = float(probabilities[token]) * count
        statistic += (seen[token] - expected) ** 2 / expected
    assert statistic < 73


def test_top_k_and_top_p_leave_the_likeliest_tokens(loaded: Loaded) -> None:
    for prompt, answer in pairs(loaded.sample(replace(SAMPLING, top_k=5))):
        values, tokens = loaded.logits(prompt, answer).topk(5)
        logprobs = values.log_softmax(-1)
        for place, token in enumerate(answer.token_ids.tolist()):
            number = tokens[place].tolist().index(token)
            assert answer.logprobs[place] == pytest.approx(float(logprobs[place, number]), abs=1e-5)
    for prompt, answer in pairs(loaded.sample(replace(SAMPLING, top_p=0.3))):
        probabilities = loaded.logits(prompt, answer).softmax(-1)
        for place, token in enumerate(answer.token_ids.tolist()):
            likelier = probabilities[place][probabilities[place] > probabilities[place, token]]
            assert float(likelier.sum()) < 0.3


def test_ends_that_are_seen_some_tokens_later_change_no_answer(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose copies arrive when it has computed what was queued before them."""
    seen = list[int]()

    class SeenLater:
        def __init__(self, *_: object) -> None:
            self.flags = list[bool]()

        def __call__(self, unfinished: torch.Tensor, *_: object) -> bool:
            self.flags.append(bool(unfinished.max() == 0))
            return any(self.flags[:-LATER]) or len(self.flags) == SAMPLING.max_completion_length

        def finish(self) -> int:
            seen.append(sum(self.flags))
            return 0

    often = replace(SAMPLING, stop_ids=list(range(0, 384, 4)))
    expected = loaded.sample(often, batch_size=3)
    monkeypatch.setattr(generation, "StopCheck", SeenLater)
    answers = loaded.sample(often, batch_size=3)
    assert seen == [LATER + 1] * 3  # tokens of each batch from its end on
    for (_, one), (_, other) in zip(pairs(answers), pairs(expected), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_answers_end_with_the_positions_of_the_model(loaded: Loaded) -> None:
    prompts = [Prompt(0, {}, "", "", [5] * 250), PROMPTS[0]]
    answers = loaded.sample(replace(SAMPLING, stop_ids=[]), prompts=prompts)
    assert [len(answer.token_ids) for answer in answers[0]] == [6, 6, 6]  # of 256
    alone = loaded.sample(replace(SAMPLING, stop_ids=[]), prompts=PROMPTS[:1])
    assert [one.token_ids.tolist() for one in answers[1]] == [
        one.token_ids.tolist() for one in alone[0]
    ]


def test_logits_that_are_not_finite_end_the_command(loaded: Loaded, tiny_model: Path) -> None:
    other = Loaded(tiny_model, loaded._runtime)
    with torch.no_grad():
        other.model.lm_head.weight[3] = torch.nan
    with pytest.raises(RunFailure, match="logits are not finite"):
        other.sample(SAMPLING)
