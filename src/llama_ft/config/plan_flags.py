"""The command line of recipes/plan.py: the training recipe's, and a few flags of its own."""

import os
import re
from argparse import Namespace
from pathlib import Path

from llama_ft import commands
from llama_ft.config.flags import read_flags, split_words
from llama_ft.config.gpus import device_for
from llama_ft.config.load import load
from llama_ft.config.names import known, told_apart
from llama_ft.config.paths import looks_local
from llama_ft.config.sections import Config
from llama_ft.config.wording import nearest, nearest_file
from llama_ft.errors import UserError

RANKS_OF_A_NODE, MOST_RANKS = 8, 4096
NUMBERS = {
    "nproc": "Ranks to plan for; default 1.",
    "nproc_per_node": "Ranks of a node; default as many as divide nproc, at most 8. HYBRID_SHARD shards within a node.",
}
TEXTS = {
    "fit": "A device's memory, as 80GiB, or its name, as h100: plan one change after another, and print what fits.",
    "fit_out": "With --fit: a folder to write them to, each as a recipe.",
}
SWITCHES = {
    "quick": "Extrapolate from models of 3 and 5 layers: seconds also for the largest. With --fit: also for what fits.",
    "json": "Print the plan as JSON.",
}
OWN = NUMBERS | TEXTS | SWITCHES


def read_plan_flags(argv: list[str], demo_recipe: Path) -> tuple[Config, dict[str, str], Namespace]:
    """Returns the recipe's settings, where each was set, and the flags in `OWN`.

    Neither weights nor data are needed: of files and folders only the model's has to be there.

    Args:
        argv: the words after the script's name.
        demo_recipe: see `load`.

    Raises:
        UserError: with one message for every mistake.
    """
    own, others = split_words(argv, set(OWN))
    options, mistakes = Namespace(nproc=1, nproc_per_node=None, fit=None, fit_out=None, quick=False, json=False), []
    given = set[str]()
    for name, flag, value in own:
        if name in given:
            mistakes.append(f"{flag}: given twice.")
        given.add(name)
        if name in SWITCHES:
            if value is not None:
                mistakes.append(f'"{value}" stands alone: a value follows its flag, and {flag} takes none.')
            setattr(options, name, True)
        elif value is None:
            mistakes.append(f"{flag} needs {'a number' if name in NUMBERS else 'a value'}.")
        elif name in TEXTS:
            setattr(options, name, value)
        elif not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MOST_RANKS:
            mistakes.append(f"{flag} {value}: expected a whole number from 1 to {MOST_RANKS}.")
        else:
            setattr(options, name, int(value))
    whole = [ranks for ranks in range(1, RANKS_OF_A_NODE + 1) if options.nproc % ranks == 0]
    options.nproc_per_node = options.nproc_per_node or max(whole)
    if not mistakes and options.nproc % options.nproc_per_node:
        mistakes.append(
            f"--nproc_per_node {options.nproc_per_node}: {options.nproc} ranks do not make whole nodes of it."
        )
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        mistakes.append("plan.py is one process, without torchrun; --nproc says how many ranks to plan for.")
    if options.fit_out and not options.fit:
        mistakes.append("--fit_out: nothing is searched without --fit.")
    slips = {word: _own_meant(word) for word in others}
    mistakes += [f"{word.partition('=')[0]} is not a flag. Did you mean --{own}?" for word, own in slips.items() if own]
    others = [word for word in others if not slips[word]]
    options.recipe = read_flags(others)[1]
    try:
        config, places = load(others, demo_recipe, paths=False)
    except UserError as error:
        raise UserError(*mistakes, *error.messages) from None
    kind = "cpu" if config.train.device == "cpu" else "cuda"
    try:
        options.fit = device_for(options.fit, kind) if options.fit else None
    except UserError as error:
        mistakes += error.messages
    if complaint := _model_complaint(config.model.model_name):
        mistakes.append(f"{places.get('model.model_name', '--model_name')} {config.model.model_name}: {complaint}")
    if mistakes:
        raise UserError(*mistakes)
    return config, places, options


def _own_meant(word: str) -> str | None:
    """Which of these flags an unknown one is a slip of."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    is_other = not word.startswith("--") or name == "config" or known(name) or told_apart(name)
    return None if is_other else nearest(name, OWN)


def _model_complaint(name: str) -> str | None:
    """A folder with config.json will do; a hub name is asked for later."""
    folder = Path(name).expanduser()
    if name == "demo" or (not looks_local(name) and not folder.exists()):
        return None
    if not folder.is_dir():
        return f"no such folder.{nearest_file(folder)}"
    return None if (folder / "config.json").is_file() else "holds no config.json."


def plan_help(text: str) -> str:
    """The training recipe's help with the flags of the plan before its own, and without its last line of usage: one
    process plans for all ranks."""
    text = re.sub(
        r"^  torchrun .* --enable_fsdp \[flags\]$",
        f"  {commands.shown('plan')} --nproc 8 --enable_fsdp --fit h100 [flags]",
        text,
        flags=re.MULTILINE,
    )
    head, usage, rest = text.partition("  --config FILE\n")
    lines = []
    for name, meaning in OWN.items():
        word = " N" if name in NUMBERS else " TEXT" if name in TEXTS else ""
        lines.append(f"  --{name}{word}\n      {meaning}")
    return head + "\n".join(lines) + "\n\n" + usage + rest
