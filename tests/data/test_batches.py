"""The order of rows, and how they become tensors."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llama_ft.data import (
    BatchPlan,
    Demo,
    collate,
    evaluation_batches,
    pad_token_id,
    row_lengths,
    target_token_counts,
)

LENGTHS = [(7 * row) % 53 + 2 for row in range(103)]
TARGETS = [length // 2 for length in LENGTHS]
LAYOUTS = [(1, 4, 1), (1, 1, 4), (2, 2, 2), (2, 4, 1), (3, 2, 2), (4, 1, 3), (8, 2, 1), (4, 4, 16)]


def plans(
    world_size: int, micro_batch: int, accumulation: int, seed: int = 42, global_batch: int | None = None
) -> list[BatchPlan]:
    global_batch = global_batch or world_size * micro_batch * accumulation
    return [
        BatchPlan(
            LENGTHS,
            TARGETS,
            global_batch=global_batch,
            world_size=world_size,
            rank=rank,
            micro_batch=micro_batch,
            seed=seed,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), LAYOUTS)
def test_every_row_is_seen_once_an_epoch(world_size: int, micro_batch: int, accumulation: int) -> None:
    ranks = plans(world_size, micro_batch, accumulation)
    assert ranks[0].steps_per_epoch == math.ceil(103 / (world_size * micro_batch * accumulation))
    for epoch in (0, 1):
        seen = []
        for step in range(ranks[0].steps_per_epoch):
            shares = [plan.step(epoch, step) for plan in ranks]
            rows = [row for share in shares for batch in share.micro_batches for row in batch]
            assert len({len(share.micro_batches) for share in shares}) == 1
            assert all(len(batch) <= micro_batch for share in shares for batch in share.micro_batches)
            assert {share.target_tokens for share in shares} == {sum(TARGETS[row] for row in rows)}
            seen += rows
        assert sorted(seen) == list(range(103))


def test_global_batches_do_not_depend_on_the_number_of_ranks() -> None:
    def global_batches(world_size: int, micro_batch: int) -> list[set[int]]:
        ranks = plans(world_size, micro_batch, 1, global_batch=24)
        return [
            {row for plan in ranks for batch in plan.step(1, step).micro_batches for row in batch}
            for step in range(ranks[0].steps_per_epoch)
        ]

    assert global_batches(1, 24) == global_batches(1, 2) == global_batches(2, 3) == global_batches(3, 4)
    assert global_batches(4, 6) == global_batches(1, 24)


def test_ranks_without_rows_get_empty_micro_batches() -> None:
    plan = BatchPlan([5, 4, 3], [1, 1, 1], global_batch=8, world_size=4, rank=3, micro_batch=2, seed=0)
    assert plan.step(0, 0).micro_batches == [[]]
    assert plan.step(0, 0).target_tokens == 3


def test_order_is_a_function_of_seed_epoch_and_step_alone() -> None:
    first, again = plans(2, 2, 2)[1], plans(2, 2, 2)[1]
    forward = {(epoch, step): first.step(epoch, step) for epoch in range(3) for step in range(5)}
    backward = {key: again.step(*key) for key in reversed(forward)}
    assert forward == backward
    firsts = {str(plans(1, 50, 1, seed)[0].step(epoch, 0).micro_batches) for seed in (1, 2) for epoch in (0, 1, 2)}
    assert len(firsts) == 6


def test_each_round_of_micro_batches_has_the_longest_rows_left_on_all_ranks() -> None:
    shortest_before = max(LENGTHS)
    for micro_batches in zip(*(plan.step(0, 0).micro_batches for plan in plans(2, 2, 8)), strict=True):
        lengths = [LENGTHS[row] for batch in micro_batches for row in batch]
        assert max(lengths) <= shortest_before
        shortest_before = min(lengths)


@pytest.mark.parametrize(("rows", "world_size", "batch_size"), list(itertools.product([1, 5, 16], [1, 2, 4], [1, 3])))
def test_evaluation_sees_every_row_once(rows: int, world_size: int, batch_size: int) -> None:
    ranks = [evaluation_batches(rows, world_size, rank, batch_size, 0) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row for batches in ranks for batch in batches for row in batch) == list(range(rows))
    assert all(len(batch) <= batch_size for batches in ranks for batch in batches)


def test_evaluation_stops_after_max_batches() -> None:
    assert evaluation_batches(10, 2, 1, 2, 2) == [[1, 3], [5, 7]]


@pytest.fixture
def rows() -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3], list(range(20)), [4, 5]],
            "labels": [[-100, 2, 3], list(range(20)), [-100, 5]],
            "target_tokens": [2, 19, 1],
            "source": ["a:1", "a:2", "a:3"],
        }
    )


def test_rows_are_padded_on_the_right_without_mask_or_label(rows: Dataset) -> None:
    batch = collate(rows, [2, 0], pad_token_id=9)
    assert batch.input_ids.tolist() == [[4, 5, 9], [1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.labels.tolist() == [[-100, 5, -100], [-100, 2, 3]]
    assert batch.sources == ["a:3", "a:1"]
    assert {batch.input_ids.dtype, batch.attention_mask.dtype, batch.labels.dtype} == {torch.int64}


def test_empty_micro_batch_is_the_beginning_of_a_row_without_labels(rows: Dataset) -> None:
    batch = collate(rows, [], pad_token_id=9, filler_index=1)
    assert batch.input_ids.tolist() == [list(range(8))]
    assert batch.attention_mask.tolist() == [[1] * 8]
    assert batch.labels.tolist() == [[-100] * 8]
    assert batch.sources == []


def test_lengths_and_counts_are_those_of_the_rows(rows: Dataset, tmp_path: Path) -> None:
    assert row_lengths(rows).tolist() == [3, 20, 2]
    assert target_token_counts(rows).tolist() == [2, 19, 1]
    assert row_lengths(rows.select([2, 0])).tolist() == [2, 3]


def test_pad_token_falls_back_to_the_end_of_turn(
    demo: Demo, llama3: PreTrainedTokenizerFast, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir)
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert pad_token_id(llama3) == llama3.eos_token_id
    assert pad_token_id(make_tokenizer([], None)) == 0


def test_a_pad_token_that_the_model_has_no_embedding_for_is_not_used(llama3: PreTrainedTokenizerFast) -> None:
    llama3.add_special_tokens({"pad_token": "<pad>"})
    assert pad_token_id(llama3) == pad_token_id(llama3, len(llama3)) == len(llama3) - 1
    assert pad_token_id(llama3, len(llama3) - 1) == llama3.eos_token_id
    assert pad_token_id(llama3, 5) == 0
