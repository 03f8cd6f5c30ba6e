"""The registry of objectives, config/objectives.py: nothing outside knows one of them by name."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

from llama_ft.config import Config, PreferenceConfig
from llama_ft.config.objectives import OBJECTIVES
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.training import Objective, build_objective

SOURCE = REPOSITORY / "src" / "llama_ft"
FOLDER = SOURCE / "training" / "objectives"
REGISTRY = SOURCE / "config" / "objectives.py"
SHARED = {"base", "first_pass"}  # files of the folder that are no objective's own
# Words that only an objective has; `reward` and `distill` are also other words.
NAMES = "|".join(OBJECTIVES)
UNMISTAKABLE = re.compile(rf"\b({'|'.join(OBJECTIVES.keys() - {'reward', 'distill'})})\b", re.I)
NAMED = re.compile(rf"objective[ =]({NAMES})\b")
# Objectives of extensions are named there.
EXTENSIONS = [SOURCE / Path(*entry.implementation.split(".")[1:3]) for entry in OBJECTIVES.values()]
EXTENSIONS = [folder for folder in EXTENSIONS if "extensions" in folder.parts]
CLASSES = {entry.implementation.partition(":")[2] for entry in OBJECTIVES.values()}
ALLOWED = {
    # training's front door: what recipes of users and tests import
    ("training/__init__.py", "SupervisedFineTuning"),
    # of any model with a score head: inference and export know no objective
    ("training/__init__.py", "set_pad_token"),
}


def found_in(file: Path) -> Iterator[str]:
    """Yield what names an objective: a value, a text of a message, or a class; not comments and
    docstrings."""
    tree = ast.parse(file.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            text = node.value
            if text in OBJECTIVES or UNMISTAKABLE.search(text) or NAMED.search(text):
                yield text
        if isinstance(node, ast.Attribute) and node.attr in CLASSES:
            yield node.attr
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            own = module.startswith("llama_ft.training.objectives.")
            if own and module.rpartition(".")[2] not in SHARED:
                yield from (alias.name for alias in node.names)


def test_no_other_file_names_an_objective() -> None:
    files = [*SOURCE.rglob("*.py"), *(REPOSITORY / "recipes").glob("*.py")]
    named = set()
    for file in files:
        if file == REGISTRY or any(map(file.is_relative_to, (FOLDER, *EXTENSIONS))):
            continue
        place = file.relative_to(SOURCE if file.is_relative_to(SOURCE) else REPOSITORY)
        named |= {(str(place), text) for text in found_in(file)}
    assert named <= ALLOWED, sorted(named - ALLOWED)


def test_every_class_is_in_the_registry() -> None:
    written = set()
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and "Objective" in {
                ast.unparse(b) for b in node.bases
            }:
                written.add(f"llama_ft.training.objectives.{file.stem}:{node.name}")
    named = {entry.implementation for entry in OBJECTIVES.values()}
    assert written == {name for name in named if ".extensions." not in name}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_built_from_its_settings(name: str) -> None:
    entry = OBJECTIVES[name]
    assert entry.settings and set(entry.settings) <= SETTINGS.keys()
    assert isinstance(
        build_objective(Config(preference=PreferenceConfig(objective=name))), Objective
    )


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, llama_ft.config; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
