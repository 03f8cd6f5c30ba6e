"""The tokens and labels of benchmarks/trl_comparison/comparison.py, as the recipe has them and as TRL takes them."""

from llama_ft.data import IGNORED, Batch

Examples = list[tuple[list[int], list[int]]]  # tokens and labels


def examples_of(batch: Batch) -> Examples:
    return [(ids.tolist(), labels.tolist()) for ids, labels in batch.examples()]


def rows_of(examples: Examples) -> list[dict[str, list[int]]]:
    return [{"input_ids": ids, "labels": labels} for ids, labels in examples]


def without_tail(example: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Without the line break after the end of the last turn: no loss, and nothing after it."""
    ids, labels = example
    end = len(labels)
    while labels[end - 1] == IGNORED:
        end -= 1
    return ids[:end], labels[:end]


def pairs_of(examples: Examples) -> list[dict[str, list[int]]]:
    """Chosen and rejected responses follow each other."""
    shortened = [without_tail(example) for example in examples]
    rows = []
    for chosen, rejected in zip(shortened[::2], shortened[1::2], strict=True):
        prompt = chosen[1].count(IGNORED)  # tokens; all of them come first
        assert chosen[0][:prompt] == rejected[0][:prompt]
        row = {"prompt_ids": chosen[0][:prompt], "chosen_ids": chosen[0][prompt:]}
        rows.append({**row, "rejected_ids": rejected[0][prompt:]})
    return rows


def target_tokens(micro_batches: list[Examples], steps: int) -> list[int]:
    """The labels in the loss up to each step, as metrics.jsonl counts them."""
    per_step = len(micro_batches) // steps
    total = 0
    totals = []
    for first in range(0, len(micro_batches), per_step):
        for batch in micro_batches[first : first + per_step]:
            for _, labels in batch:
                total += sum(label != IGNORED for label in labels[1:])
        totals.append(total)
    return totals
