"""What a run, or anybody else, has left that can be loaded, found without torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from llama_ft.config.paths import folder_problem, looks_local
from llama_ft.config.settings import Config, QuantizationConfig
from llama_ft.export_flags import export_kind

Result = Literal["checkpoint", "run", "adapter", "model"]  # run: one without a final model, but with checkpoints


def find_result(folder: Path) -> tuple[Result, Path] | None:
    """Return what there is to load in a directory, and where: of a run's directory the final model, else its
    checkpoints; None if it holds nothing of the kind."""
    kind = export_kind(folder)
    if kind == "checkpoint":
        return "checkpoint", folder
    for place in (folder, folder / "model"):
        if (place / "adapter_config.json").is_file() and not any(place.glob("model*.safetensors")):
            return "adapter", place
        if (place / "config.json").is_file():
            return "model", place
    return ("run", folder) if kind == "run" else None


def result_problem(name: str) -> str | None:
    """Return why `name` cannot be loaded: it is no run, checkpoint, adapter, model directory or Hub name."""
    if not looks_local(name):
        return None
    folder = Path(name).expanduser()
    if problem := folder_problem(folder, "the directory of a run, a checkpoint, a model or an adapter"):
        return problem
    return None if find_result(folder) else "holds no run with a final model or a checkpoint, no model and no adapter."


def settings_beside(kind: Result, held: Path) -> Config | None:
    """Return the settings of the run that left what find_result found; None if it is of no run or of another version.
    A whole model is not quantized as in its run: only the base model below an adapter is."""
    try:
        if kind == "checkpoint":
            return Config(**json.loads((held / "trainer.json").read_text())["config"])
        file = (held if kind == "run" else held.parent) / "config.yaml"
        run = Config(**yaml.safe_load(file.read_text()))
    except (OSError, ValueError, yaml.YAMLError, ValidationError, LookupError, TypeError):
        return None
    return replace(run, quantization=QuantizationConfig()) if kind == "model" else run
