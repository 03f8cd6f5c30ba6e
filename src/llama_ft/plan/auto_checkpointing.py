"""`--activation_checkpointing auto`: no more is recomputed than memory asks for."""

import dataclasses
from dataclasses import dataclass

import torch

from llama_ft.config import Config
from llama_ft.config.messages import size_text
from llama_ft.errors import UserError
from llama_ft.plan.changes import changed
from llama_ft.plan.fit import USABLE
from llama_ft.plan.predict import CUDA_CONTEXT_BYTES, BuildModel, PlanRequest, predict
from llama_ft.plan.types import Plan
from llama_ft.runtime.out_of_memory import host_memory

CHECKPOINTING = ("off", "selective", "full")  # what is kept, the most first
PYTHON_BYTES = 600 * 2**20  # a rank's libraries: torch, transformers and their like


@dataclass(frozen=True)
class Choice:
    """What auto came to be.

    Attributes:
        config: the recipe with it.
        why: for the log.
        plan: a quick one of that recipe; None where there was no need for one.
    """

    config: Config
    why: str
    plan: Plan | None = None


def is_open(config: Config) -> bool:
    """Whether a recipe leaves the choice to the machine."""
    return config.train.activation_checkpointing == "auto"


def choose_checkpointing(request: PlanRequest, build_model: BuildModel, most_bytes: int | None) -> Choice:
    """The first of off, selective and full with which a recipe fits by its quick plan, else the one that holds least.
    This process must not have a process group.

    Args:
        request: whose config says auto.
        build_model: the recipe's.
        most_bytes: what a rank may hold on its device; None: that is not known.

    Raises:
        UserError: as the run itself would.
    """
    if most_bytes is None:
        return settled(request.config, "off", request.device, "how much memory there is is not known")
    choice, beside = None, ""
    for how in CHECKPOINTING:
        config = changed(request.config, {"activation_checkpointing": how}, request.device)
        if config is None:
            continue  # selective, where layers are no units
        try:
            plan = predict(dataclasses.replace(request, config=config), build_model, quick=True)
        except UserError:
            if how == "off":
                raise
            continue  # this architecture cannot be checkpointed
        fits, needs = plan.device_bytes <= USABLE * most_bytes, size_text(plan.device_bytes)
        verdict = "" if fits else ", which is too much"
        choice = Choice(config, _line(how, f"planned {needs} of {size_text(most_bytes)}{verdict}{beside}"), plan)
        if fits:
            break
        beside += f"; {how} would take {needs}"
    return choice or settled(request.config, "full", request.device, "it could not be planned")


def settled(config: Config, how: str, device: str, why: str) -> Choice:
    """A choice made without a plan."""
    chosen = changed(config, {"activation_checkpointing": how}, device)
    assert chosen is not None, how
    return Choice(chosen, _line(how, why))


def _line(how: str, why: str) -> str:
    return f"activation_checkpointing auto: {how} ({why})"


def free_bytes(device: torch.device, local_world_size: int) -> int | None:
    """What a rank of this machine could hold on its device now, as a plan counts it: Python's libraries apart, CUDA
    itself included. None where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT_BYTES if torch.cuda.is_available() else None
    host = host_memory()
    return None if host is None else host.available_bytes // local_world_size
