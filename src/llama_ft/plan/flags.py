"""The command line of recipes/plan.py: the training recipe's, and a few flags of its own."""

import difflib
import math
import re
import sys
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.reading.dump import asks_for_help, exit_with_help, flags_text, help_text
from llama_ft.config.reading.load import load
from llama_ft.config.reading.parse import words_of
from llama_ft.config.reading.tool_flags import check, read
from llama_ft.config.settings.settings import Config, settings_of
from llama_ft.config.value_types import STRICT, Count, CountOrZero, Size, parse_size
from llama_ft.errors import UserError

RANKS_OF_A_NODE = 8
# Memory in GiB: the lower end of the totals in torch's out-of-memory messages (22.03 on an L4,
# 23.64 on an RTX 4090, 79.15 to 79.25 on an A100). ECC, firmware and driver take the rest of the
# nominal size.
GPUS: dict[str, float] = {
    "t4": 14.5,
    "v100": 15.7,
    "v100-32": 31.7,
    "a10": 21.9,
    "a10g": 21.9,
    "a40": 44.3,
    "l4": 21.9,
    "l40": 44.3,
    "l40s": 44.3,
    "rtx3090": 23.5,
    "rtx4080": 15.6,
    "rtx4090": 23.5,
    "rtx5080": 15.4,
    "rtx5090": 31.3,
    "rtxa4000": 15.6,
    "rtxa5000": 23.5,
    "rtxa6000": 47.4,
    "rtx6000ada": 47.3,
    "a100-40": 39.3,
    "a100": 79.1,
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
}
USUAL_GPUS = ("rtx4080", "rtx4090", "l40s", "h100")  # 16, 24, 48 and 80 GB
WITHOUT_BF16 = ("t4", "v100", "v100-32")
# Other ways to write these names, in lower case and without what is neither letter nor digit.
OTHER_NAMES = {"a10080": "a100", "h10080": "h100", "v10016": "v100"}
OTHER_NAMES |= {re.sub("[^a-z0-9]", "", name): name for name in GPUS}
OTHER_NAMES |= {name.removeprefix("rtx"): name for name in GPUS if name.startswith("rtx")}
VENDORS = re.compile("^(nvidia|geforce|tesla|amd|instinct)+")
NAMES_OF_FIT = ("gpu", "vram", "gpu_memory")  # what people try
MOST_GIB = 1000  # a number without a unit is GiB up to here


@dataclass(config=STRICT, kw_only=True)
class PlanFlags:
    """Flags of recipes/plan.py, in addition to those of recipes/finetuning.py."""

    nproc: Count = 1
    """Ranks to plan for."""

    nproc_per_node: Count | None = None
    """Ranks per node; if not given, as many as divide nproc, at most 8. HYBRID_SHARD shards within
    a node."""

    fit: str | None = None
    """Search for settings that fit this GPU (h100) or size (80GiB, 80), and print them."""

    price: Annotated[float, Field(gt=0)] | None = None
    """Price of one GPU for an hour, in any currency: print the cost too. Needs --fit with a GPU's
    name."""

    quick: bool | None = None
    """Extrapolate from models of 3 and 5 layers, in seconds for any size. If not given: true with
    --fit. --quick false plans every layer."""

    longest: list[str] | None = None
    """Print the longest packed sequence that fits each of these GPUs or sizes (rtx4090 80GiB 8xh100),
    with what can be changed for it. Without a value: of 16, 24, 48 and 80 GB."""

    host_memory: Size | None = None
    """Host memory of a node (128GiB): --longest finds lengths that fit it, too. If not given: unlimited."""

    images: CountOrZero = 0
    """Images in each packed sequence, or in each padded sample; 0: text only."""

    image_tokens: Count | None = None
    """With --images: tokens of an image; if not given, those of an image of --max_pixels, or else of
    1 megapixel."""

    json: bool = False
    """Print the plan as JSON."""

    # not flags: the sizes that fit and host_memory mean
    fit_bytes: ClassVar[int] = 0
    host_bytes: ClassVar[float] = math.inf

    @property
    def gpu(self) -> str:
        """Name of the GPU in --fit; "" if it is a size."""
        return find_gpu(self.fit or "")


def read_plan_flags(
    argv: list[str], demo_config: Path, description: str = ""
) -> tuple[Config, dict[str, str], PlanFlags]:
    """Return the settings, where each was set, and the plan's own flags with resolved
    `nproc_per_node` and `fit_bytes`. Files need not exist. Raises UserError with one message per
    error. --help prints `description` and exits. For the other arguments see
    `llama_ft.config.reading.load`."""
    own = settings_of(PlanFlags)
    if asks_for_help(argv):
        text = help_text(description, sys.argv[0], everything="all" in argv)
        about, usage, notes, rest = text.split("\n\n", 3)
        single, _ = usage.splitlines()[1:]  # the other line starts several processes
        usage = f"Usage:\n{single}\n{single} --enable_fsdp --nproc 8 --fit h100"
        plan_flags = flags_text(own, "Flags of the plan:")
        exit_with_help("\n\n".join([about, usage, notes, plan_flags, rest]))
    ours = list[str]()
    others = list[str]()
    unknown = list[str]()
    flag_name = ""  # the last flag
    for word in words_of(argv):
        flag_name = word.name if word.flag else flag_name
        if word.flag and flag_name in NAMES_OF_FIT:
            unknown.append(f"{word.flag} is not a flag. Did you mean --fit?")
            continue
        if word.name == "longest" and word.value is None:
            ours.append(f"{word.flag}={','.join(USUAL_GPUS)}")
        elif not word.flag and flag_name == "longest":  # --longest rtx4090 h100
            ours[-1] += f",{word.value}"
        elif flag_name in own:
            ours.extend(word.as_typed)
        else:
            others.extend(word.as_typed)
    options, _, errors = read(ours, PlanFlags, description)
    errors += unknown
    options.nproc_per_node = options.nproc_per_node or ranks_of_node(options.nproc)
    try:
        config, places = load(others, demo_config, paths=False)
        options.fit_bytes = device_bytes(options.fit) if options.fit else 0
        for gpu in options.longest or ():
            _, one = split_gpus(gpu)
            device_bytes(one, "--longest")
        if options.host_memory:
            options.host_bytes = parse_size(options.host_memory)
    except UserError as failure:
        raise UserError(*errors, *failure.messages) from None
    gpus = [("--fit", options.fit or "")] + [("--longest", gpu) for gpu in options.longest or ()]
    for flag, gpu in gpus:
        _, one = split_gpus(gpu)
        if find_gpu(one) in WITHOUT_BF16 and config.train.precision.startswith("bf16"):
            errors.append(f"{flag} {gpu}: this GPU does not compute bf16. Add --precision fp16.")
    if options.price is not None and not options.gpu:
        errors.append(
            f"--price {options.price:g}: needs --fit with a GPU's name, whose published speed it takes: "
            f"one of {', '.join(GPUS)}."
        )
    if options.image_tokens and not options.images:
        errors.append("--image_tokens: has no effect without --images.")
    if options.host_memory and not options.longest:
        errors.append("--host_memory: has no effect without --longest.")
    if options.longest and options.fit:
        errors.append("--longest: cannot be combined with --fit. Remove one.")
    check(errors)
    if options.quick is None:
        options.quick = options.fit is not None
    return config, places, options


def ranks_of_node(ranks: int) -> int:
    """Return the ranks per node, if nobody says it: as many as divide `ranks`, at most 8."""
    return max(number for number in range(1, RANKS_OF_A_NODE + 1) if ranks % number == 0)


def split_gpus(text: str) -> tuple[int, str]:
    """Return the number of GPUs in `8xh100`, 0 if there is none, and the GPU."""
    count, _, gpu = text.partition("x")
    if gpu and count.isdecimal() and int(count):
        return int(count), gpu
    return 0, text


def find_gpu(text: str) -> str:
    """Return the name in GPUS that is meant by `RTX 4090`, `a100-80GB` or `h100`; "" if none is."""
    plain = re.sub("[^a-z0-9]", "", text.lower())
    return OTHER_NAMES.get(VENDORS.sub("", plain).removesuffix("gb"), "")


def device_bytes(text: str, flag: str = "--fit") -> int:
    """Return the bytes of a GPU's name or a size, the value of `flag`: `h100`, `80GiB`, `24000MB`, `24`
    (GiB). Raises UserError for anything else."""
    if name := find_gpu(text):
        return int(GPUS[name] * 2**30)
    try:
        is_gib = text.isdecimal() and 0 < int(text) <= MOST_GIB
        return int(text) * 2**30 if is_gib else parse_size(text)
    except ValueError:
        known = f"the memory of a rank, such as 80GiB, or one of {', '.join(GPUS)}"
        similar = difflib.get_close_matches(text.lower(), GPUS, n=1)
        hint = f" Did you mean {similar[0]}?" if similar else ""
        raise UserError(f"{flag} {text}: expected {known}.{hint}") from None
