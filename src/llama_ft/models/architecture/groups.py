"""Groups of parameters by name: which of them have settings of their own, and which are frozen."""

import re
from collections.abc import Sequence

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config.settings.structured_values import ParameterGroup
from llama_ft.errors import UserError
from llama_ft.models.base.layers import decoder_layers
from llama_ft.models.base.source import listed
from llama_ft.models.built import ModelRequest

NAMES_SHOWN = 3


def find_groups(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[str, int]:
    """Return the name of each parameter that a group matches -> the number of the group. A tied
    parameter has several names, and each of them counts; the result has the first.

    Raises:
        UserError: a parameter belongs to two groups.
    """
    patterns = [re.compile(group["match"]) for group in groups]
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers = dict[str, int]()
    if not patterns:
        return numbers
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names[id(parameter)]
        for number, pattern in enumerate(patterns):
            if not pattern.search(name):
                continue
            other = numbers.setdefault(first_name, number)
            if other != number:
                both = f'"{groups[other]["match"]}" and "{groups[number]["match"]}"'
                raise UserError(
                    f"--groups: {name} matches {both}. Change the patterns so that one of them matches."
                )
    return numbers


def freeze_groups(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Check that every group matches trained parameters, and freeze those of groups with `freeze`.

    Raises:
        UserError: a pattern matches nothing or only frozen parameters, two patterns match the same
            one, or nothing is left to train.
    """
    numbers = find_groups(model, groups)
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    errors = []
    for number, group in enumerate(groups):
        members = [name for name in numbers if numbers[name] == number]
        if not members:
            examples = listed(trained, NAMES_SHOWN)
            errors.append(
                f'--groups: "{group["match"]}" matches no parameter. Trained are {examples}.'
            )
        elif not any(parameters[name].requires_grad for name in members):
            examples = listed(members, NAMES_SHOWN)
            errors.append(
                f'--groups: "{group["match"]}" matches only frozen parameters: {examples}.'
            )
    if errors:
        raise UserError(*errors)
    for name, number in numbers.items():
        if groups[number].get("freeze"):
            parameters[name].requires_grad_(False)
    if groups and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("--groups: every parameter is frozen, so there is nothing to train.")


def freeze_first_layers(model: PreTrainedModel, count: int) -> None:
    """Freeze the first `count` decoder layers."""
    layers = decoder_layers(model)
    if count >= len(layers):
        raise UserError(
            f"--num_freeze_layers {count}: this model has {len(layers)} decoder layers; freeze fewer."
        )
    for layer in layers[:count]:
        layer.requires_grad_(False)


def freeze(model: PreTrainedModel, request: ModelRequest) -> None:
    """Freeze what is not trained: the first layers with freeze_layers, and the groups that say so;
    of a reference everything, since frozen weights take half the memory."""
    config = request.config
    if request.purpose == "reference":
        model.requires_grad_(False)
    if config.model.freeze_layers:
        freeze_first_layers(model, config.model.num_freeze_layers)
    if request.purpose != "reference":
        freeze_groups(model, config.train.groups)
