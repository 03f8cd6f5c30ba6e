"""Build the objective that the settings name, and choose the dataset format that it needs."""

import dataclasses
from types import SimpleNamespace

from llama_ft.config import Config, stores_reference, values_of
from llama_ft.config.rules import OF_TOKENS
from llama_ft.data.formats import PREFERENCE, UNPAIRED
from llama_ft.training.objectives.base import Objective
from llama_ft.training.objectives.distill import Distillation
from llama_ft.training.objectives.kto import Kto
from llama_ft.training.objectives.preferences import Preferences
from llama_ft.training.objectives.reference import AdapterOff, StoredReference
from llama_ft.training.objectives.reward import RewardModeling
from llama_ft.training.objectives.sft import SupervisedFineTuning


def build_objective(config: Config) -> Objective:
    """Return the objective that `--objective` names."""
    if config.preference.objective == "sft":
        return SupervisedFineTuning(config.train.label_smoothing_factor, config.train.loss_type)
    if config.preference.objective == "distill":
        asked = config.preference
        return Distillation(asked.distill_weight, asked.distill_temperature, asked.distill_top_k)
    if config.preference.objective == "reward":
        return RewardModeling(config.preference.center_rewards_coefficient)
    is_stored = stores_reference(SimpleNamespace(**values_of(config)))
    reference = StoredReference() if is_stored else AdapterOff()
    if config.preference.objective == "kto":
        return Kto(config.preference, reference)  # type: ignore[return-value]  # mypy: examples is an assigned function
    return Preferences(config.preference, reference)


def resolve_format(config: Config) -> Config:
    """Return the settings. A dataset_format of auto becomes the format that the objective needs."""
    if config.preference.objective in OF_TOKENS or config.data.dataset_format != "auto":
        return config
    wanted = UNPAIRED if config.preference.objective == "kto" else PREFERENCE
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dataset_format=wanted))
