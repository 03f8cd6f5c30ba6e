"""pass@k against a count of all subsets of answers."""

from itertools import combinations

import pytest

from llama_ft.errors import UserError
from llama_ft.evaluation.pass_at_k import (
    describe_pass_at_k,
    mean_pass_at_k,
    pass_at_k,
    powers_of_two,
)


@pytest.mark.parametrize("answers", [1, 2, 5, 8])
def test_it_is_the_share_of_subsets_with_a_right_answer(answers: int) -> None:
    for right in range(answers + 1):
        is_right = [number < right for number in range(answers)]
        for k in range(1, answers + 1):
            subsets = list(combinations(is_right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(answers, right, k) == pytest.approx(share, rel=1e-12)


def test_prompts_count_equally_and_answers_without_a_reward_are_wrong() -> None:
    totals = [[1.0, None, 0.0, 0.9], [1.0, 1.5, 1.0, 2.0], [None] * 4]
    assert mean_pass_at_k(totals, 1.0, 1) == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert mean_pass_at_k(totals, 0.9, 1) == pytest.approx((2 / 4 + 1 + 0) / 3)
    assert describe_pass_at_k(totals, 1.0) == (
        "pass@1 41.7%, pass@2 50.0%, pass@4 66.7% (3 prompts, right: a reward of at least 1)"
    )


def test_k_is_at_most_the_number_of_answers() -> None:
    assert [powers_of_two(count) for count in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]
    with pytest.raises(UserError, match="pass@8: needs at least 8 answers per prompt; there are 4"):
        mean_pass_at_k([[1.0] * 4], 1.0, 8)
    assert describe_pass_at_k([], 1.0) == "pass@k: there are no answers"
