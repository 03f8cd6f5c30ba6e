"""The longest packed sequence that fits a GPU (llama-ft plan --longest), by a search over plans.

Memory grows with the length, and nearly in proportion to it. So the search interpolates between the
longest planned length that fits and the shortest that does not, until they are 2% apart. The plans of
a method serve all GPUs. What is printed was planned itself, and fits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llama_ft import models
from llama_ft.config.wording.messages import size_text
from llama_ft.errors import UserError
from llama_ft.phases import MemoryCategory
from llama_ft.plan.fit import USABLE, apply_changes
from llama_ft.plan.flags import device_bytes
from llama_ft.plan.predict import predict
from llama_ft.plan.types import Plan, PlanRequest, Recipe

FIRST_LENGTHS = (2048, 16_384)  # planned first
SHORTEST = 512
MULTIPLE = 64  # lengths are multiples of it
LONGEST = 64 * 2**20
CLOSE = 1.02  # a length that does not fit over one that fits: the search ends
LARGE = 0.4  # share of the growth: a category that limits the length

Change = dict[str, Any]  # settings by field name


class Longest(NamedTuple):
    """The longest sequence of a method on a GPU.

    Attributes:
        gpu: as it was asked for.
        flags: what the method changes, as on a command line; empty: the run as it is.
        tokens: of the longest packed sequence that fits; 0: not even 512 tokens do.
        limits: the categories of memory that grow most with the length.
        host_bytes: host memory per rank for tensors at this length.
        beyond: the length is above the model's positions.
    """

    gpu: str
    flags: list[str]
    tokens: int
    limits: list[MemoryCategory]
    host_bytes: int
    beyond: bool


class _Method:
    """Plans of one method at several lengths."""

    def __init__(self, request: PlanRequest, recipe: Recipe, flags: list[str]) -> None:
        self.flags = flags
        self._request = request
        self._recipe = recipe
        self._plans: dict[int, Plan] = {}

    def plan(self, tokens: int) -> Plan:
        """Return the plan of packed sequences of this length."""
        if tokens not in self._plans:
            request = dataclasses.replace(self._request, pack_length=tokens)
            self._plans[tokens] = predict(request, self._recipe, quick=True)
        return self._plans[tokens]

    def fits(self, tokens: int, room: float) -> bool:
        """Return whether sequences of this length fit a device of `room` bytes."""
        return self.plan(tokens).device_bytes <= USABLE * room

    def search(self, room: float) -> int:
        """Return the longest length that fits, 0 if 512 tokens do not."""
        for length in FIRST_LENGTHS:
            self.plan(length)
        if not self.fits(SHORTEST, room):
            return 0
        while True:
            lengths = sorted(self._plans)
            fitting = [length for length in lengths if self.fits(length, room)]
            below = fitting[-1]
            above = next((length for length in lengths if length > below), LONGEST)
            if above <= max(below * CLOSE, below + MULTIPLE) or below >= LONGEST:
                return below
            self.plan(self._next(below, above, room))

    def _next(self, below: int, above: int, room: float) -> int:
        """Return a length between one that fits and one that does not, or was not planned: where a
        line through two plans reaches the limit, and a little less or more, so that both ends
        move."""
        limit = USABLE * room
        lengths = sorted(self._plans)
        if above in self._plans:
            first, second = below, above
        else:
            first, second = lengths[lengths.index(below) - 1], below
        start = self.plan(first).device_bytes
        slope = (self.plan(second).device_bytes - start) / (second - first)
        at_limit = first + (limit - start) / slope if slope > 0 else 2 * below
        guess = at_limit * (0.995 if at_limit - below > above - at_limit else 1.005)
        rounded = round(guess / MULTIPLE) * MULTIPLE
        if above not in self._plans:
            return max(below + MULTIPLE, min(rounded, 8 * below, LONGEST))
        return max(below + MULTIPLE, min(rounded, above - MULTIPLE))

    def limits(self, tokens: int) -> list[MemoryCategory]:
        """Return the categories that grow most up to this length, at its peak."""
        shorter = min(self._plans)
        peak = self.plan(tokens).peak
        before = next(each.holders for each in self.plan(shorter).peaks if each.phase == peak.phase)
        growth = {name: size - before[name] for name, size in peak.holders.items()}
        total = sum(value for value in growth.values() if value > 0) or 1
        largest = sorted(growth, key=lambda name: -growth[name])
        return [name for name in largest if growth[name] >= LARGE * total] or largest[:1]


def find_longest(
    request: PlanRequest, recipe: Recipe, gpus: Sequence[str], report: Callable[[str], Any]
) -> list[Longest]:
    """Return the longest sequences, by GPU and then by method.

    Args:
        request: the run. Its micro-batches become one packed sequence.
        recipe: the functions that a plan runs.
        gpus: names of GPUs, or sizes, as for --fit.
        report: called with a text about each method.

    Raises:
        UserError: the run has no packed sequences.
    """
    if request.config.data.batching_strategy != "packing":
        raise UserError(
            "--longest: packed sequences are planned, but batching_strategy is padding. Leave it out."
        )
    one: Change = {"batch_size_training": 1, "val_batch_size": 1, "gradient_accumulation_steps": 1}
    if request.config.train.activation_checkpointing == "auto":
        one["activation_checkpointing"] = "off"
    config, _, _ = apply_changes(request, [(one, "")])
    assert config is not None
    base = dataclasses.replace(request, config=config)
    methods = list[_Method]()
    for change in methods_of(base):
        changed, _, flags = apply_changes(base, [(change, "")])
        if changed is None or (change and not flags):
            continue  # the run would reject these settings, or has them already
        method = _Method(dataclasses.replace(base, config=changed), recipe, flags)
        try:
            method.plan(FIRST_LENGTHS[0])
        except UserError as error:
            if not change:
                raise
            report(f"{' '.join(flags)}: {error}")
            continue
        methods.append(method)
    positions = _positions(request)
    rows = list[Longest]()
    for gpu in gpus:
        for method in methods:
            tokens = method.search(device_bytes(gpu))
            report(f"{gpu} {' '.join(method.flags) or 'as it is'}: {tokens:,} tokens")
            limits: list[MemoryCategory] = method.limits(tokens) if tokens else []
            host = method.plan(tokens).host_bytes if tokens else 0
            rows.append(Longest(gpu, method.flags, tokens, limits, host, tokens > positions))
    return rows


def methods_of(request: PlanRequest) -> list[Change]:
    """Return what is changed, each more than the one before: nothing, activation checkpointing,
    offloaded activations, and shared sequences."""
    methods: list[Change] = [{}]
    best: Change = {"activation_checkpointing": "full"}
    methods.append(best)
    if request.device == "cuda":
        best = best | {"activation_offload": True}
        methods.append(best)
    size = 2
    while request.world_size % size == 0:
        methods.append(best | {"enable_fsdp": True, "sequence_parallel_size": size})
        size *= 2
    return methods


def _positions(request: PlanRequest) -> float:
    config = request.config.model
    model_config = models.load_model_config(request.folder, config.trust_remote_code)
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return longest or float("inf")


def describe_longest(rows: Sequence[Longest], ranks: int) -> str:
    """Return the table, with notes below."""
    on = f"{ranks} GPUs" if ranks > 1 else "one GPU"
    lines = [f"Longest packed sequence in tokens, on {on} with micro-batches of one sequence:"]
    titles = ("GPU", "tokens", "limited by", "host memory", "with")
    cells = [titles]
    for row in rows:
        mark = "*" if row.beyond else ""
        cells.append(
            (
                row.gpu,
                f"{row.tokens:,}{mark}" if row.tokens else "none",
                ", ".join(row.limits) or "weights",
                size_text(row.host_bytes),
                " ".join(row.flags) or "the settings as they are",
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    for row_cells in cells:
        gpu, tokens, limits, host, flags = row_cells
        lines.append(
            f"  {gpu:<{widths[0]}}  {tokens:>{widths[1]}}  {limits:<{widths[2]}}  {host:>{widths[3]}}  {flags}"
        )
    if any(row.beyond for row in rows):
        lines.append(
            "* above the positions of the model: it needs a scaled RoPE in config.json, and training at that length."
        )
    lines.append("Each length was planned, and fits 97% of the GPU's memory. 2% more does not.")
    return "\n".join(lines)
