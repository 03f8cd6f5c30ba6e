"""What a run, or anybody else, has left that can be loaded or exported; told without torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from llama_ft.config.paths import adapter_problem, folder_problem, looks_local, looks_safely, model_problem
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


@looks_safely
def result_problem(name: str) -> str | None:
    """Say why `name` is nothing that can be loaded: a run's directory, a checkpoint, an adapter, a model's directory
    or Hub name."""
    if not looks_local(name):
        return None
    folder = Path(name).expanduser()
    if problem := folder_problem(
        folder, "the directory of a run, a checkpoint, or the folder of a model or an adapter"
    ):
        return problem
    found = find_result(folder)
    if found is None:
        if any(folder.glob("step-*")):
            return f"holds checkpoints. Name one of them, or the run: {folder.parent}."
        for place in (folder, folder / "model"):
            if weights := next(iter(sorted(place.glob("*model*.safetensors"))), None):
                needed = "adapter_config.json" if weights.name.startswith("adapter") else "config.json"
                return f"holds {weights.relative_to(folder)} but no {needed} beside it."
        return (
            "is neither the directory of a run with a final model or a checkpoint, nor a checkpoint, model or adapter."
        )
    kind, place = found
    if kind == "adapter":
        return adapter_problem(str(place))
    return model_problem(str(place)) if kind == "model" else None


def settings_beside(kind: Result, held: Path) -> Config | None:
    """Return the settings of the run that left what find_result found; None if it is of no run or of another version.
    A whole model has no quantization of its run's: that is of what an adapter stands beside."""
    try:
        if kind == "checkpoint":
            return Config(**json.loads((held / "trainer.json").read_text())["config"])
        file = (held if kind == "run" else held.parent) / "config.yaml"
        run = Config(**yaml.safe_load(file.read_text()))
    except (OSError, ValueError, yaml.YAMLError, ValidationError, LookupError, TypeError):
        return None
    return replace(run, quantization=QuantizationConfig()) if kind == "model" else run
