"""The order of samples, and how they become tensors."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from llama_ft.data import BatchLayout, collate, evaluation_batches, pad_token_id
from llama_ft.data.batches.sampler import BatchSampler, pack_samples

LENGTHS = [(7 * sample) % 53 + 2 for sample in range(103)]
TARGETS = [length // 2 for length in LENGTHS]
LAYOUTS = [(1, 4, 1), (1, 1, 4), (2, 2, 2), (3, 2, 2), (8, 2, 1), (4, 4, 16)]


def plans(
    world_size: int,
    micro_batch: int,
    accumulation: int,
    seed: int = 42,
    pack_length: int | None = None,
) -> list[BatchSampler]:
    layouts = [
        BatchLayout(
            data_size=world_size, data_rank=rank, micro_batch=micro_batch, pack_length=pack_length
        )
        for rank in range(world_size)
    ]
    size = world_size * micro_batch * accumulation
    return [
        BatchSampler(LENGTHS, TARGETS, layout, global_batch=size, seed=seed) for layout in layouts
    ]


@pytest.mark.parametrize("pack_length", [None, 60])
@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), LAYOUTS)
def test_every_sample_is_seen_once_per_epoch_within_the_token_limit(
    world_size: int, micro_batch: int, accumulation: int, pack_length: int | None
) -> None:
    global_batch = world_size * micro_batch * accumulation
    ranks = plans(world_size, micro_batch, accumulation, pack_length=pack_length)
    assert ranks[0].steps_per_epoch == math.ceil(len(ranks[0]) / global_batch)
    for epoch in (0, 1):
        seen = list[int]()
        light = 0
        for step in range(ranks[0].steps_per_epoch):
            shares = [plan.step(epoch, step) for plan in ranks]
            assert len({len(share) for share in shares}) == 1
            tokens = [
                [sum(LENGTHS[sample] for sample in batch) for batch in share] for share in shares
            ]
            if pack_length is None:
                assert all(len(batch) <= micro_batch for share in shares for batch in share)
            else:
                assert max(map(max, tokens)) <= pack_length * micro_batch
            # every micro-batch has all its packed sequences
            if pack_length and (step + 1) * global_batch <= len(ranks[0]):
                light += sum(
                    count < 0.95 * pack_length * micro_batch
                    for counts in tokens
                    for count in counts
                )
            samples = [sample for share in shares for batch in share for sample in batch]
            targets = sum(TARGETS[sample] for sample in samples)
            assert {plan.counts(epoch, step) for plan in ranks} == {(targets, len(samples))}
            seen += samples
        assert sorted(seen) == list(range(103))
        assert light <= 1  # one packed sequence per epoch has the rest


@pytest.mark.parametrize("pack_length", [None, 60])
def test_global_batches_do_not_depend_on_the_number_of_ranks(pack_length: int | None) -> None:
    def global_batches(*layout: int) -> list[set[int]]:
        ranks = plans(*layout, pack_length=pack_length)
        return [
            {sample for plan in ranks for batch in plan.step(1, step) for sample in batch}
            for step in range(ranks[0].steps_per_epoch)
        ]

    assert (
        global_batches(1, 12, 1)
        == global_batches(2, 3, 2)
        == global_batches(3, 4, 1)
        == global_batches(4, 1, 3)
    )


def test_order_is_a_function_of_seed_epoch_and_step_alone() -> None:
    first = plans(2, 2, 2)[1]
    again = plans(2, 2, 2)[1]
    forward = {(epoch, step): first.step(epoch, step) for epoch in range(3) for step in range(5)}
    backward = {key: again.step(*key) for key in reversed(forward)}
    assert forward == backward
    firsts = {
        str(plans(1, 50, 1, seed)[0].step(epoch, 0)) for seed in (1, 2) for epoch in (0, 1, 2)
    }
    assert len(firsts) == 6


@pytest.mark.parametrize(
    ("samples", "world_size", "batch_size"), list(itertools.product([1, 5, 16], [1, 2, 4], [1, 3]))
)
def test_evaluation_sees_every_sample_once(samples: int, world_size: int, batch_size: int) -> None:
    lengths = numpy.arange(samples) % 7 + 1
    layouts = [
        BatchLayout(data_size=world_size, data_rank=rank, micro_batch=batch_size)
        for rank in range(world_size)
    ]
    ranks = [evaluation_batches(lengths, layout) for layout in layouts]
    packed = [evaluation_batches(lengths, replace(layout, pack_length=9)) for layout in layouts]
    assert len({len(batches) for batches in packed}) == 1
    assert sorted(sample for batches in packed for batch in batches for sample in batch) == list(
        range(samples)
    )
    assert all(lengths[batch].sum() <= 9 * batch_size for batches in packed for batch in batches)
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(sample for batches in ranks for batch in batches for sample in batch) == list(
        range(samples)
    )
    assert all(len(batch) <= batch_size for batches in ranks for batch in batches)
    layout = BatchLayout(data_size=2, data_rank=1, micro_batch=2)
    assert evaluation_batches(numpy.ones(10), layout, max_batches=2) == [[1, 3], [5, 7]]


@pytest.mark.parametrize("pack_length", [None, 500])
def test_samples_of_a_step_are_drawn_without_regard_to_their_lengths(
    pack_length: int | None,
) -> None:
    lengths = numpy.random.default_rng(0).integers(1, 500, 8000)
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=8, pack_length=pack_length)
    plan = BatchSampler(lengths, lengths, layout, global_batch=8, seed=1)
    steps = [plan.step(0, step)[0] for step in range(plan.steps_per_epoch)]
    assert sorted(itertools.chain.from_iterable(steps)) == list(range(8000))
    # The mean of n independent draws has the n-th part of their variance.
    means = numpy.array([lengths[step].mean() for step in steps])
    sizes = numpy.array([len(step) for step in steps])
    errors = (means - lengths.mean()) * numpy.sqrt(sizes) / lengths.std()
    assert 0.9 < errors.var() < 1.1 if pack_length is None else errors.var() < 1.1
    # Neighboring steps are not alike, either.
    assert abs(numpy.corrcoef(means[1:], means[:-1])[0, 1]) < 0.1


def test_padded_samples_of_a_micro_batch_have_similar_lengths() -> None:
    lengths = numpy.random.default_rng(0).integers(1, 500, 4096)
    layouts = [BatchLayout(data_size=2, data_rank=rank, micro_batch=8) for rank in (0, 1)]
    ranks = [BatchSampler(lengths, lengths, one, global_batch=128, seed=1) for one in layouts]
    padded = 0
    for plan in ranks:
        for step in range(plan.steps_per_epoch):
            batches = plan.step(0, step)
            padded += sum(lengths[batch].max() * len(batch) for batch in batches)
    assert lengths.sum() > 0.88 * padded  # in random order it is 0.56


@pytest.fixture
def samples() -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3], list(range(20)), [4, 5]],
            "labels": [[-100, 2, 3], list(range(20)), [-100, 5]],
            "target_tokens": [2, 19, 1],
            "source": ["a:1", "a:2", "a:3"],
            "desirable": [None] * 3,
        }
    )


def test_samples_are_padded_on_the_right_without_mask_or_label(samples: Dataset) -> None:
    batch = collate(samples, [2, 0], pad_token_id=9)
    assert batch.input_ids.tolist() == [[4, 5, 9], [1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.labels.tolist() == [[-100, 5, -100], [-100, 2, 3]]
    assert batch.locations == ["a:3", "a:1"]
    assert {batch.input_ids.dtype, batch.attention_mask.dtype, batch.labels.dtype} == {torch.int64}
    assert (batch.tokens, batch.target_tokens) == (5, 3)


def test_packed_samples_are_concatenated_and_none_predicts_the_next(samples: Dataset) -> None:
    batch = collate(samples, [2, 1, 0], pad_token_id=9, is_packed=True)
    assert batch.input_ids.tolist() == [[4, 5, *range(20), 1, 2, 3]]
    assert batch.labels.tolist() == [[-100, 5, -100, *range(1, 20), -100, 2, 3]]
    assert batch.example_lengths == [2, 20, 3]
    assert batch.locations == ["a:3", "a:2", "a:1"]
    assert (batch.tokens, batch.target_tokens) == (25, 22)
    assert batch.input_ids.dtype == torch.int64
    for is_packed in (True, False):  # a rank without samples
        empty = collate(samples, [], pad_token_id=9, is_packed=is_packed)
        assert (empty.input_ids.tolist(), empty.labels.tolist(), empty.locations) == (
            [[1, 2, 3]],
            [[-100] * 3],
            [],
        )
    layout = BatchLayout(data_size=4, data_rank=3, micro_batch=2)
    plan = BatchSampler([5, 4, 3], [1, 1, 1], layout, global_batch=8, seed=0)
    assert plan.step(0, 0) == [[]]
    assert plan.counts(0, 0) == (3, 3)


def test_pad_token_falls_back_to_the_end_of_turn_token(
    llama3: PreTrainedTokenizerFast,
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = make_tokenizer(["</s>", "<pad>"], None, eos_token="</s>", pad_token="<pad>")
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert pad_token_id(llama3) == llama3.eos_token_id
    assert pad_token_id(llama3, 5) == pad_token_id(make_tokenizer([], None)) == 0


CHANCE = numpy.random.default_rng(0)
CAPACITY = 2048


def natural(
    draw: Callable[[int], numpy.ndarray], samples: int = 20_000, longest: int = CAPACITY
) -> numpy.ndarray:
    return numpy.clip(draw(samples), 1, longest).astype(numpy.int64)


KINDS = {
    "log-normal": natural(lambda n: CHANCE.lognormal(5, 1, n)),
    "exponential": natural(lambda n: CHANCE.exponential(300, n)),
    "uniform": natural(lambda n: CHANCE.integers(1, CAPACITY + 1, n)),
    "nearly equal": natural(lambda n: CHANCE.normal(480, 80, n)),
    "few": natural(lambda n: CHANCE.lognormal(5, 1, n), 70),
    "mostly long": natural(lambda n: CHANCE.normal(1500, 300, n)),
}


def least_number(lengths: numpy.ndarray, pack_length: int) -> int:
    """A bound no packing can go below (Martello and Toth's L2): for every size, samples that leave no
    room for samples of that size count whole, and the small ones fill what the middle ones leave."""
    best = math.ceil(lengths.sum() / pack_length)
    for small in numpy.unique(lengths[2 * lengths <= pack_length]).tolist():
        alone = lengths > pack_length - small
        middle = (2 * lengths > pack_length) & ~alone
        little = (2 * lengths <= pack_length) & (lengths >= small)
        over = lengths[little].sum() - (middle.sum() * pack_length - lengths[middle].sum())
        best = max(best, int(alone.sum() + middle.sum()) + max(0, math.ceil(over / pack_length)))
    return best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [CAPACITY, 5 * CAPACITY])  # searched, and best-fit
def test_packing_needs_few_sequences(kind: str, capacity: int) -> None:
    lengths = KINDS[kind]
    sequences, tokens = pack_samples(lengths, capacity)
    least = least_number(lengths, capacity)
    assert len(sequences) <= math.ceil((1.002 if capacity == CAPACITY else 1.02) * least)
    longest_first = numpy.sort(lengths)[::-1]
    each_once = numpy.sort(numpy.concatenate(sequences))
    assert numpy.array_equal(each_once, numpy.arange(len(lengths)))
    assert [longest_first[slots].sum() for slots in sequences] == tokens.tolist()
    assert max(tokens) <= capacity


def test_packed_sequences_of_the_quickstart_are_nearly_full() -> None:
    # like docstrings of 256 tokens at most: many truncated ones, many in the middle
    lengths = natural(lambda n: numpy.random.default_rng(1).lognormal(4.5, 0.6, n), 5000, 256)
    sequences, _ = pack_samples(lengths, 256)
    assert len(sequences) <= 1.002 * least_number(lengths, 256)
