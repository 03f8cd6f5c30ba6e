"""Folders that look like what a run leaves, for who only looks at names."""

from pathlib import Path

MODEL = ("config.json", "model.safetensors")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def make(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder
