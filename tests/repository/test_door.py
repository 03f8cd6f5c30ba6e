"""Extensions come through llama_ft/door.py: a folder and a name each."""

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from conftest import REPOSITORY, run, write_rows
from edited_copy import OTHER_TREE
from forked import forked
from pages import Page

from llama_ft import door


def test_importing_what_extensions_say_imports_neither_torch_nor_transformers() -> None:
    """Nor does importing their settings and flags, which --help prints within a second."""
    code = """
import sys
from llama_ft import door
print(len(door.extensions()), {"torch", "transformers"} & sys.modules.keys())
import llama_ft.config
tools = {tool for extension in door.extensions() for tool in extension.tools}
flags = [door.flags_of(tool) for tool in tools]
print(len(tools) == len(flags), {"torch", "transformers"} & sys.modules.keys())
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == f"{len(door.NAMES)} set()\nTrue set()\n"


def references(value: Any) -> Iterator[str]:
    """Yield all `module:Class` in what an extension brings."""
    if isinstance(value, str):
        yield from re.findall(r"^[\w.]+:\w+$", value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from references(item)
    elif dataclasses.is_dataclass(value):
        for item in vars(value).values():
            yield from references(item)


def test_all_that_extensions_name_exists() -> None:
    found = list(references(door.extensions()))
    assert "llama_ft.extensions.kubeflow.part:KubeflowProgress" in found
    assert all(callable(resolve_name(name)) for name in found)


BROKEN = """
import sys, types
from llama_ft import door
door.NAMES = (*door.NAMES, "waiting")
extensions = "llama_ft.extensions."
if sys.argv[1] != "no folder":
    sys.modules[extensions + "waiting"] = types.ModuleType("waiting", "An extension.")
    sys.modules[extensions + "waiting"].__path__ = []
    module = sys.modules[extensions + "waiting.extension"] = types.ModuleType("extension.py")
    module.__file__ = "waiting/extension.py"
if sys.argv[1] == "no class":
    module.EXTENSION = door.Extension(settings={"waiting": "llama_ft.door:Waiting"})
import llama_ft.config
"""
PROBLEMS = {
    "no folder": "llama_ft.extensions.waiting.extension:EXTENSION: there is no module llama_ft.extensions.waiting.",
    "no EXTENSION": "waiting/extension.py has no EXTENSION.",
    "no class": "door.py has no Waiting.",
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_broken_extension_ends_in_one_sentence(what: str) -> None:
    finished = run([sys.executable, "-c", BROKEN, what])
    assert finished.exit_code == 2, finished.output
    [line] = finished.output.splitlines()
    assert line.startswith("error: ")
    assert PROBLEMS[what] in line


def copy_with_extension(folder: Path) -> Path:
    """Copy the tree, and put the extension of the documentation into the copy."""
    for name in ("src/llama_ft", "recipes", "configs"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=skipped)
    extension = folder / "src/llama_ft/extensions/waiting"
    extension.mkdir()
    files = ("__init__.py", "extension.py", "settings.py", "part.py")
    blocks = Page("docs/development/add-an-extension.md").blocks("python")
    for file, text in zip(files, blocks, strict=True):
        (extension / file).write_text(text)
    file = folder / "src/llama_ft/door.py"
    text = file.read_text()
    names = ", ".join(f'"{name}"' for name in (*door.NAMES, "waiting"))
    start = text.index("NAMES = (")
    end = text.index(")", start)
    file.write_text(f"{text[:start]}NAMES = ({names}{text[end:]}")
    return folder


def test_a_new_extension_is_its_folder_and_its_name(tiny_model: Path, tmp_path: Path) -> None:
    """With a setting and a part; it is the one of the documentation."""
    copy = copy_with_extension(tmp_path / "copy")
    write_rows(tmp_path / "rows.jsonl", 12)
    output_dir = tmp_path / "run"
    flags = f"--model_name {tiny_model} --dataset {tmp_path}/rows.jsonl --output_dir {output_dir}"
    others = "--context_length 64 --max_train_step 3 --no_plan --save_model no --waiting_file w.txt"
    recipe = copy / "recipes/finetuning.py"
    finished = forked(OTHER_TREE, copy, recipe, *flags.split(), *others.split())

    assert finished.exit_code == 0, finished.output
    assert len((output_dir / "w.txt").read_text().splitlines()) == 3
    assert "waiting.waiting_file = w.txt (default none)" in finished.output
    assert "waiting_file: w.txt" in (output_dir / "config.yaml").read_text()
