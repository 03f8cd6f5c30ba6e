"""One file per objective. config/objectives.py has their names and settings; base.py is what they
share."""

import dataclasses
from pkgutil import resolve_name

from llama_ft.config import Config
from llama_ft.training.objectives.base import Objective


def build_objective(config: Config) -> Objective:
    """Return the objective that `--objective` names."""
    objective: Objective = resolve_name(config.preference.entry.implementation)(config)
    return objective


def resolve_format(config: Config) -> Config:
    """Return the settings as the objective needs them. A dataset_format of auto becomes its format,
    and packing becomes padding if it generates examples."""
    entry = config.preference.entry
    data = config.data
    if entry.formats and data.dataset_format == "auto":
        data = dataclasses.replace(data, dataset_format=entry.formats[0])
    if entry.make_steps is not None:
        data = dataclasses.replace(data, batching_strategy="padding")
    return dataclasses.replace(config, data=data)
