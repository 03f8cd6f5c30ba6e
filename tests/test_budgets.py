"""The code stays small, and imports point one way. CONTRIBUTING.md says what to do when a budget is reached."""

import ast
from collections import Counter
from pathlib import Path

from conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "llama_ft"
LONGEST_FILE = 400
# Lines per folder, of 19,000 in all.
LINES = {
    "": 430, "checkpoint": 1660, "config": 1950, "data": 3290, "evaluation": 340, "inference": 760, "models": 4020,
    "observe": 1270, "plan": 1540, "report": 470, "run": 400, "runtime": 1050, "training": 1880,
}  # fmt: skip
# What each folder imports of the others. config knows nobody; tools know the rest and are known by no other folder.
BELOW = {
    "": {"config"}, "config": set(), "runtime": {"config"}, "data": {"config", "runtime"},
    "models": {"config", "runtime"}, "report": {"config"}, "observe": {"config", "models", "runtime"},
    "training": {"config", "data", "models", "runtime"},
    "checkpoint": {"config", "data", "models", "runtime", "training"},
    "plan": {"checkpoint", "config", "data", "models", "observe", "runtime", "training"},
    "inference": {"checkpoint", "config", "data", "models", "runtime", "training"},
    "evaluation": {"config", "data", "inference", "models", "runtime", "training"},
    "run": {"checkpoint", "config", "data", "models", "observe", "plan", "report", "runtime", "training"},
}  # fmt: skip


def folder_of(file: Path) -> str:
    if file == SOURCE / "run.py":  # of the recipe: it may import everything, and nothing imports it
        return "run"
    return file.relative_to(SOURCE).parts[0] if file.parent != SOURCE else ""


def test_no_folder_and_no_file_exceeds_its_budget() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in SOURCE.rglob("*.py")}
    assert not {str(file): count for file, count in lines.items() if count > LONGEST_FILE}
    used = Counter[str]()
    for file, count in lines.items():
        used[folder_of(file)] += count
    assert not {folder: count for folder, count in used.items() if count > LINES[folder]}


def test_imports_point_one_way() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if not name.startswith("llama_ft."):
                    continue
                target = name.removeprefix("llama_ft.").partition(".")[0]
                is_folder = target == "run" or (SOURCE / target).is_dir()
                if is_folder and target != folder_of(file) and target not in BELOW[folder_of(file)]:
                    wrong.append(f"{file.relative_to(SOURCE)} imports {target}")
    assert not wrong
