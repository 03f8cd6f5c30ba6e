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
    """Return the settings. A dataset_format of auto becomes the format that the objective needs."""
    formats = config.preference.entry.formats
    if not formats or config.data.dataset_format != "auto":
        return config
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, dataset_format=formats[0])
    )
