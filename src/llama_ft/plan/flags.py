"""The command line of recipes/plan.py: the training recipe's, and a few flags of its own."""

import os
import sys
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.aliases import known
from llama_ft.config.dump import flags_text, help_text
from llama_ft.config.load import config_file, load
from llama_ft.config.messages import nearest
from llama_ft.config.parse import words_of
from llama_ft.config.paths import folder_problem, looks_local
from llama_ft.config.run_settings import STRICT
from llama_ft.config.settings import Config, settings_of
from llama_ft.config.tool_flags import check, read
from llama_ft.errors import UserError
from llama_ft.plan.gpus import Device, device_for

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

    device: ClassVar[Device | None] = None  # no flags: what fit names, and the value of --config
    recipe: ClassVar[str | None] = None


def read_plan_flags(
    argv: list[str], demo_config: Path, description: str = ""
) -> tuple[Config, dict[str, str], PlanFlags]:
    """Return the settings, where each was set, and the plan's own flags, with `device` and `recipe` settled.

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
        print(
            help_text(description, sys.argv[0]).replace("\n\n", f"\n\n{flags_text(own, 'Flags of the plan:')}\n\n", 1)
        )
        sys.exit(0)
    words = list(words_of(argv))
    near = {word.name: not known(word.name) and nearest(word.name, own, 0.8) for word in words if word.flag}
    mine = [text for word in words if word.flag and near[word.name] for text in word.as_typed]
    others = [text for word in words if not (word.flag and near[word.name]) for text in word.as_typed]
    options, _, errors = read(mine, PlanFlags, description)
    whole = [ranks for ranks in range(1, RANKS_OF_A_NODE + 1) if options.nproc % ranks == 0]
    options.nproc_per_node = options.nproc_per_node or max(whole)
    if options.nproc % options.nproc_per_node:
        errors.append(f"--nproc_per_node {options.nproc_per_node}: {options.nproc} ranks are no whole number of nodes.")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        errors.append("plan.py is one process, without torchrun; --nproc says how many ranks to plan for.")
    if options.fit_out and not options.fit:
        errors.append("--fit_out: nothing is searched without --fit.")
    try:
        config, places = load(others, demo_config, paths=False)
        kind = "cpu" if config.train.device == "cpu" else "cuda"
        options.device = device_for(options.fit, kind) if options.fit else None
    except UserError as failure:
        raise UserError(*errors, *failure.messages) from None
    name = config.model.model_name
    folder = Path(name).expanduser()
    is_directory = looks_local(name) or folder.exists()
    wrong = folder_problem(folder, "a directory with config.json") if name != "demo" and is_directory else None
    if name != "demo" and is_directory and wrong is None and not (folder / "config.json").is_file():
        wrong = "holds no config.json."
    errors += [f"{places.get('model.model_name', '--model_name')} {name}: {wrong}"] if wrong else []
    check(errors)
    options.recipe = config_file(others)[0]
    return config, places, options
