"""Micro-batches of the answers of a round."""

from typing import Any

import pytest
from extensions.rollouts.made_rounds import make_round

from llama_ft.data import IGNORED, BatchLayout, StepBatches
from llama_ft.extensions.rollouts.grpo.batches import AnswerSelection, make_step, select

MICRO_BATCH = 4
PROMPTS = 18
ANSWERS = 8


class NoTexts:
    """A tokenizer that is not needed."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_of_short_answers_are_larger_and_none_has_more_tokens(ranks: int) -> None:
    totals = [[float(number) for number in range(ANSWERS)]] * PROMPTS
    rollouts = make_round(totals, NoTexts())
    how = AnswerSelection(scale="group", drops_equal=False, masks_truncated=False)
    chosen = select(rollouts, how)
    expected = {}  # location -> tokens of its prompt and its own
    for prompt, group in zip(rollouts.prompts, rollouts.answers, strict=True):
        for number, answer in enumerate(group):
            location = f"round 1, prompt {prompt.index}, answer {number}"
            expected[location] = (prompt.token_ids, answer.token_ids.tolist())
    longest = max(len(prompt) + len(answer) for prompt, answer in expected.values())
    longest_answer = max(len(answer) for _, answer in expected.values())

    planned = StepBatches(batches=[], target_tokens=1, samples=1)
    counts = []
    found = {}
    for rank in range(ranks):
        layout = BatchLayout(data_size=ranks, data_rank=rank, micro_batch=MICRO_BATCH)
        batches = make_step(chosen, planned, layout, rollouts, None).batches
        counts.append(len(batches))
        for batch in batches:
            assert batch.input_ids.numel() <= MICRO_BATCH * longest
            assert batch.target_tokens <= MICRO_BATCH * longest_answer
            for location, (ids, labels) in zip(batch.locations, batch.examples(), strict=True):
                assert location not in found
                is_answer = labels != IGNORED
                found[location] = (ids[~is_answer].tolist(), labels[is_answer].tolist())
    assert found == expected
    assert len(set(counts)) == 1
    assert counts[0] < PROMPTS * ANSWERS / (MICRO_BATCH * ranks)
