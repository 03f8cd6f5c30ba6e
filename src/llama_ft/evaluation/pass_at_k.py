"""pass@k: the probability that at least one of k answers to a prompt is right.

It is estimated from n answers of which c are right, without bias:

    1 - C(n - c, k) / C(n, k)

1 - (1 - c / n)^k would be too low. Source: M. Chen and others, Evaluating large language models
trained on code, https://arxiv.org/abs/2107.03374, equation 1.
"""

import math
from collections.abc import Sequence

from llama_ft.errors import UserError, plural

Totals = Sequence[float | None]  # of the answers to a prompt; None: without a reward, so not right


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Return the estimate for a prompt.

    Args:
        answers: number of answers to the prompt.
        right: how many of them are.
        k: at most `answers`.
    """
    if not 1 <= k <= answers:
        raise UserError(f"pass@{k}: needs at least {k} answers per prompt; there are {answers}.")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def powers_of_two(answers: int) -> list[int]:
    """Return 1, 2, 4 and so on up to the number of answers, and that number."""
    powers = [2**power for power in range(answers.bit_length()) if 2**power <= answers]
    return sorted({*powers, answers})


def mean_pass_at_k(totals: Sequence[Totals], threshold: float, k: int) -> float:
    """Return the mean over prompts. An answer without a reward is not right: to leave it out would
    make the model look better.

    Args:
        totals: rewards of the answers to each prompt.
        threshold: an answer with at least this reward is right.
        k: at most the number of answers to each prompt.
    """
    estimates = list[float]()
    for of_prompt in totals:
        right = sum(total is not None and total >= threshold for total in of_prompt)
        estimates.append(pass_at_k(len(of_prompt), right, k))
    return math.fsum(estimates) / len(estimates)


def describe_pass_at_k(totals: Sequence[Totals], threshold: float) -> str:
    """Return a line for the log with pass@1, pass@2, pass@4 and so on."""
    if not totals:
        return "pass@k: there are no answers"
    parts = []
    for k in powers_of_two(min(map(len, totals))):
        parts.append(f"pass@{k} {mean_pass_at_k(totals, threshold, k):.1%}")
    about = f"{plural(len(totals), 'prompt')}, right: a reward of at least {threshold:g}"
    return f"{', '.join(parts)} ({about})"
