"""The command line of recipes/plan.py: the training recipe's, and a few flags of its own."""

import sys
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.dump import flags_text, help_text
from llama_ft.config.load import load
from llama_ft.config.parse import words_of
from llama_ft.config.paths import looks_local
from llama_ft.config.run_settings import STRICT
from llama_ft.config.settings import Config, settings_of
from llama_ft.config.tool_flags import check, read
from llama_ft.errors import UserError
from llama_ft.plan.gpus import device_bytes

RANKS_OF_A_NODE, MOST_RANKS = 8, 4096


@dataclass(config=STRICT, kw_only=True)
class PlanFlags:
    """Flags of recipes/plan.py, in addition to those of recipes/finetuning.py."""

    nproc: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    """Ranks to plan for."""

    nproc_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = None
    """Ranks per node; if not given, as many as divide nproc, at most 8. HYBRID_SHARD shards within a node."""

    fit: str | None = None
    """A device's memory, as 80GiB, or its name, as h100: plan one change after another, and print what fits."""

    fit_out: str | None = None
    """With --fit: a directory to write them to, each as a config."""

    quick: bool = False
    """Extrapolate from models of 3 and 5 layers: seconds, also for the largest. With --fit: also for what
    fits."""

    json: bool = False
    """Print the plan as JSON."""

    fit_bytes: ClassVar[int] = 0  # no flag: what fit names


def read_plan_flags(
    argv: list[str], demo_config: Path, description: str = ""
) -> tuple[Config, dict[str, str], PlanFlags]:
    """Return the settings, where each was set, and the plan's own flags, with `fit_bytes` settled.

    Neither weights nor data are needed: of all files and directories, only the model's has to be there.

    Args:
        argv: the words after the script's name.
        demo_config: see `load`.
        description: for --help.

    Raises:
        UserError: with one message for every error.
        SystemExit: 0 after --help.
    """
    own = settings_of(PlanFlags)
    if {"--help", "-h"} & set(argv):
        text = help_text(description, sys.argv[0])
        print(text.replace("\n\n", f"\n\n{flags_text(own, 'Flags of the plan:')}\n\n", 1))
        sys.exit(0)
    words = [(word.flag and word.name in own, word.as_typed) for word in words_of(argv)]
    others = [text for is_own, typed in words if not is_own for text in typed]
    options, _, errors = read([text for is_own, typed in words if is_own for text in typed], PlanFlags, description)
    whole = (ranks for ranks in range(1, RANKS_OF_A_NODE + 1) if options.nproc % ranks == 0)
    options.nproc_per_node = options.nproc_per_node or max(whole)
    if options.nproc % options.nproc_per_node:
        errors.append(f"--nproc_per_node {options.nproc_per_node}: {options.nproc} ranks are no whole number of nodes.")
    if options.fit_out and not options.fit:
        errors.append("--fit_out: nothing is planned without --fit.")
    try:
        config, places = load(others, demo_config, paths=False)
        options.fit_bytes = device_bytes(options.fit) if options.fit else 0
    except UserError as failure:
        raise UserError(*errors, *failure.messages) from None
    name = config.model.model_name
    folder = Path(name).expanduser()
    if name != "demo" and (looks_local(name) or folder.exists()) and not (folder / "config.json").is_file():
        errors.append(f"{places.get('model.model_name', '--model_name')} {name}: holds no config.json.")
    check(errors)
    return config, places, options
