"""The longest packed sequence that fits a GPU (llama-ft plan --longest), by a search over plans.

Memory grows nearly in proportion to the length. So a line through two plans tells where it reaches
the limit of a GPU. The lengths a little below and above are planned themselves; if they do not enclose
the limit, the search continues from them. What is printed was planned, and fits.

Each method is planned for all GPUs together, several lengths with one model: building it takes most
of the time of a plan.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from llama_ft import models
from llama_ft.config import FSDPConfig
from llama_ft.config.wording.messages import size_text
from llama_ft.errors import UserError
from llama_ft.phases import MemoryCategory
from llama_ft.plan.changes import apply_changes, auto_settings, methods_of
from llama_ft.plan.fit import USABLE
from llama_ft.plan.flags import PlanFlags, device_bytes, ranks_of_node, split_gpus
from llama_ft.plan.predict import predict_lengths
from llama_ft.plan.types import Plan, PlanRequest, Recipe

FIRST_LENGTHS = (16_384, 65_536)  # planned first
SHORTEST = 512
MULTIPLE = 64  # lengths are multiples of it
LONGEST = 64 * 2**20
CLOSE = 1.02  # a length that does not fit over one that fits: the search ends
BELOW = 0.995  # what is planned, times the length at which a line reaches the limit
# The middle is planned, too, if what fits and what does not are further apart: pinned host memory grows
# in steps, by powers of two.
WIDE = 1.2
LARGE = 0.4  # share of the growth: a category that limits the length
# Memory per token between the longer two of three lengths, each twice the one before, over that between
# the shorter two: 1 if memory grows in proportion to the length, 2 if it grows with the square.
QUADRATIC = 1.3
# Up to some length the peak may be one that does not grow, such as the optimizer step's. So what looks
# like a square at the first lengths is planned at the second ones, too.
DOUBLED = ((16_384, 32_768, 65_536), (2**18, 2**19, 2**20))
# What a rank holds at any length. Of the methods, only sharding changes it.
AT_ANY_LENGTH: tuple[MemoryCategory, ...] = (
    "sharded parameters",
    "quantized parts",
    "gradients",
    "optimizer state",
)

Change = dict[str, Any]  # settings by field name


class Longest(NamedTuple):
    """The longest sequence of a method on a GPU.

    Attributes:
        gpu: as it was asked for.
        flags: what the method changes, as on a command line; empty: the run as it is.
        tokens: of the longest packed sequence that fits; 0: not even 512 tokens do.
        limits: what grows most with the length, or the host memory.
        host_bytes: host memory per rank for tensors at this length.
        ranks: GPUs of the run.
        beyond: the length is above the model's positions.
    """

    gpu: str
    flags: list[str]
    tokens: int
    limits: list[str]
    host_bytes: int
    ranks: int = 1
    beyond: bool = False


class Room(NamedTuple):
    """Bytes of a rank's memory that a plan may take."""

    device: float
    host: float

    def has(self, plan: Plan) -> bool:
        """Return whether a plan fits."""
        return self.share(plan) <= 1

    def share(self, plan: Plan) -> float:
        """Return the larger of the shares that a plan takes of the device and of the host."""
        return max(plan.device_bytes / self.device, plan.host_bytes / self.host)


class Method:
    """Plans of one method at several lengths."""

    def __init__(self, request: PlanRequest, recipe: Recipe, flags: list[str]) -> None:
        self.flags = flags
        self._request = request
        self._recipe = recipe
        self._plans: dict[int, Plan] = {}

    def plan(self, lengths: Iterable[int]) -> None:
        """Plan packed sequences of these lengths."""
        new = sorted(set(lengths) - self._plans.keys())
        plans = predict_lengths(self._request, self._recipe, new, quick=True)
        self._plans.update(zip(new, plans, strict=True))

    def search(self, rooms: Sequence[Room]) -> list[int]:
        """Return the longest length for each room, 0 if 512 tokens do not fit."""
        self.plan(FIRST_LENGTHS)
        while True:
            lengths = [length for room in rooms for length in self._next(room)]
            if not lengths:
                break
            self.plan(lengths)
        return [max(self._fitting(room), default=0) for room in rooms]

    def _fitting(self, room: Room) -> list[int]:
        return [length for length in sorted(self._plans) if room.has(self._plans[length])]

    def _next(self, room: Room) -> list[int]:
        """Return the lengths to plan next; none if the longest that fits is known."""
        lengths = sorted(self._plans)
        fitting = self._fitting(room)
        if not fitting:
            is_known = SHORTEST in lengths or self.has_too_large_weights(room)
            return [] if is_known else [SHORTEST]
        below = fitting[-1]
        longer = [length for length in lengths if length > below]
        nearly = max(below * CLOSE, below + MULTIPLE)
        is_found = longer and longer[0] <= nearly or self._least_share(nearly, room) > 1
        if below >= LONGEST or is_found:
            return []
        most = longer[0] - MULTIPLE if longer else min(8 * below, LONGEST)
        # through the two that enclose the limit, else the two longest
        first, second = (below, longer[0]) if longer else lengths[-2:]
        start = room.share(self._plans[first])
        slope = (room.share(self._plans[second]) - start) / (second - first)
        at_limit = first + (1 - start) / slope if slope > 0 else most
        guesses = [round(at_limit * BELOW / MULTIPLE) * MULTIPLE]
        if longer and longer[0] > WIDE * below:
            guesses.append((below + longer[0]) // (2 * MULTIPLE) * MULTIPLE)
        return [max(below + MULTIPLE, min(guess, most)) for guess in guesses]

    def _least_share(self, tokens: float, room: Room) -> float:
        """Return the least share of the device that sequences of `tokens` can take: memory is the
        largest of several sums that grow with the length, so it grows at least as fast as between
        the two longest plans that fit."""
        fitting = self._fitting(room)
        if len(fitting) < 2:
            return 0
        first, second = fitting[-2:]
        start, end = (self._plans[length].device_bytes for length in (first, second))
        slope = (end - start) / (second - first)
        return (end + slope * (tokens - second)) / room.device

    @property
    def sharding(self) -> FSDPConfig:
        """What divides the weights among ranks."""
        return dataclasses.replace(self._request.config.fsdp, sequence_parallel_size=1)

    def has_too_large_weights(self, room: Room) -> bool:
        """Return whether weights, gradients and optimizer states alone do not fit, at any length."""
        plan = self._plans[min(self._plans)]
        sizes = [sum(peak.holders[name] for name in AT_ANY_LENGTH) for peak in plan.peaks]
        return max(sizes) + plan.outside_bytes > room.device

    def is_quadratic(self) -> bool:
        """Return whether memory grows with the square of the length."""
        return all(self._grows_faster(lengths) for lengths in DOUBLED)

    def _grows_faster(self, lengths: Sequence[int]) -> bool:
        self.plan(lengths)
        first, middle, last = (self._plans[length].peak.bytes for length in lengths)
        return last - middle > 2 * QUADRATIC * (middle - first)

    def describe(self, gpu: str, tokens: int, room: Room) -> Longest:
        """Return the row of the table for a length that was found."""
        ranks = self._request.world_size
        if not tokens:
            return Longest(gpu, self.flags, 0, self._limits_of_none(room), 0, ranks)
        plan = self._plans[tokens]
        limits = ["host memory"]
        if plan.device_bytes / room.device >= plan.host_bytes / room.host:
            limits = self._limits(tokens)
        return Longest(gpu, self.flags, tokens, limits, plan.host_bytes, ranks)

    def _limits_of_none(self, room: Room) -> list[str]:
        plan = self._plans[min(self._plans)]
        return ["host memory"] if plan.device_bytes <= room.device else ["weights"]

    def _limits(self, tokens: int) -> list[str]:
        """Return what grows most up to this length, at its peak."""
        peak = self._plans[tokens].peak
        shorter = self._plans[min(self._plans)]
        before = next(each.holders for each in shorter.peaks if each.phase == peak.phase)
        growth = {name: size - before[name] for name, size in peak.holders.items()}
        total = sum(value for value in growth.values() if value > 0) or 1
        largest = sorted(growth, key=lambda name: -growth[name])
        limits = [name for name in largest if growth[name] >= LARGE * total] or largest[:1]
        # Of operators: on a GPU, products of an 8-bit base and attention make such that grow with
        # the length.
        is_attention = self._request.device == "cuda"
        is_attention &= self._request.config.quantization.mode != "8bit"
        names = {"temporaries": "attention workspace" if is_attention else "temporaries"}
        names["logits and loss"] = "logits"
        return [names.get(name, name) for name in limits]


def find_longest(
    request: PlanRequest, recipe: Recipe, options: PlanFlags, report: Callable[[str], Any]
) -> tuple[list[Longest], bool]:
    """Return the longest sequences, by GPU and then by method, and whether memory grows with the square
    of the length.

    Args:
        request: the run. Its micro-batches become one packed sequence.
        recipe: the functions that a plan runs.
        options: with the GPUs, and the host memory of a node.
        report: called with a text about each method.

    Raises:
        UserError: the run has no packed sequences.
    """
    if request.config.data.batching_strategy != "packing":
        is_generated = request.config.preference.entry.make_steps is not None
        way_out = "Leave --longest out" if is_generated else "Use packing, or leave --longest out"
        raise UserError(
            "--longest: packed sequences are planned, but those of this run are padded "
            f"(batching_strategy). {way_out}."
        )
    positions = find_positions(request)
    by_ranks = dict[int, list[str]]()
    for gpu in options.longest or ():
        ranks, _ = split_gpus(gpu)
        by_ranks.setdefault(ranks or request.world_size, []).append(gpu)
    rows = dict[str, list[Longest]]()
    is_quadratic = list[bool]()
    for ranks, gpus in by_ranks.items():
        of_node = ranks_of_node(ranks)
        if ranks == request.world_size:
            of_node = request.local_world_size
        on_ranks = dataclasses.replace(request, world_size=ranks, local_world_size=of_node)
        rooms = {gpu: _room(gpu, options.host_bytes / of_node) for gpu in gpus}
        results = _search_methods(find_methods(on_ranks, recipe), rooms, report)
        for gpu, room in rooms.items():
            own = [method.describe(gpu, lengths[gpu], room) for method, lengths in results]
            rows[gpu] = [row._replace(beyond=row.tokens > positions) for row in own]
        first_method, _ = results[0]
        fits = any(row.tokens for gpu in gpus for row in rows[gpu])
        is_quadratic.append(fits and first_method.is_quadratic())
    # in the order in which the GPUs were asked for
    ordered = [row for gpu in options.longest or () for row in rows.pop(gpu, [])]
    return ordered, any(is_quadratic)


def _room(gpu: str, host_bytes: float) -> Room:
    _, one = split_gpus(gpu)
    return Room(USABLE * device_bytes(one), host_bytes)


def _search_methods(
    methods: Sequence[Method], rooms: dict[str, Room], report: Callable[[str], Any]
) -> list[tuple[Method, dict[str, int]]]:
    """Return the longest lengths by GPU, of each method that the run can use."""
    results = list[tuple[Method, dict[str, int]]]()
    too_large: FSDPConfig | None = None  # no GPU holds the weights of this sharding
    for method in methods:
        if method.sharding == too_large:
            continue
        words = " ".join(method.flags)
        try:
            tokens_by_room = method.search([*rooms.values()])
        except UserError as error:
            if not words:
                raise
            report(f"{words}: {error}")
            continue
        lengths = dict(zip(rooms, tokens_by_room, strict=True))
        texts = [f"{gpu} {tokens:,}" for gpu, tokens in lengths.items()]
        report(f"{words or 'as it is'}: {', '.join(texts)} tokens")
        results.append((method, lengths))
        if all(method.has_too_large_weights(room) for room in rooms.values()):
            too_large = method.sharding
    return results


def find_methods(request: PlanRequest, recipe: Recipe) -> list[Method]:
    """Return the run with micro-batches of one sequence, and changed as in `methods_of`."""
    one: Change = {"batch_size_training": 1, "val_batch_size": 1, "gradient_accumulation_steps": 1}
    one |= {saving.setting: saving.auto[0] for saving in auto_settings(request.config)}
    config, _, _ = apply_changes(request, [(one, "")])
    assert config is not None
    base = dataclasses.replace(request, config=config, pack_length=LONGEST)
    methods = list[Method]()
    for change in methods_of(base):
        changed, _, flags = apply_changes(base, [(change, "")])
        if changed is None or (change and not flags):
            continue  # the run would reject these settings, or has them already
        methods.append(Method(dataclasses.replace(base, config=changed), recipe, flags))
    return methods


def find_positions(request: PlanRequest) -> float:
    """Return the number of positions of the model, inf if it has no limit."""
    config = request.config.model
    model_config = models.load_model_config(request.folder, config.trust_remote_code)
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return longest or float("inf")


def describe_longest(rows: Sequence[Longest], is_quadratic: bool) -> str:
    """Return the table, with notes below. For the arguments see `find_longest`."""
    numbers = sorted({row.ranks for row in rows})
    on = f"{' or '.join(map(str, numbers))} GPUs" if numbers != [1] else "one GPU"
    lines = [f"Longest packed sequence in tokens, on {on} with micro-batches of one sequence:"]
    titles = ("GPU", "tokens", "limited by", "host memory", "with")
    cells = [titles]
    for row in rows:
        mark = "*" if row.beyond else ""
        cells.append(
            (
                row.gpu,
                f"{row.tokens:,}{mark}" if row.tokens else "none",
                ", ".join(row.limits),
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
    if is_quadratic:
        lines.append(
            "Memory grows with the square of the length: attention has no fused kernel for this model, and its "
            "scores of tokens x tokens take the memory."
        )
    if any(row.tokens for row in rows):
        lines.append("Each length was planned, and fits 97% of the GPU's memory. 2% more does not.")
    else:
        ranks, gpu = split_gpus(rows[-1].gpu)
        fit = f"--nproc {ranks} --fit {gpu}" if ranks else f"--fit {gpu}"
        lines.append(
            f"Not even {SHORTEST} tokens fit. {fit} also searches changes of the training, such as adapters and "
            "4-bit weights."
        )
    return "\n".join(lines)
