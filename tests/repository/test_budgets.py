"""The code stays small, and imports point one way. CONTRIBUTING.md says what to do when a budget is
reached."""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "llama_ft"
LONGEST_FILE = 600  # lines
# Tokens per folder: names, operators, numbers and strings, without docstrings and comments. Lines
# are free. Whoever needs more raises the number in the same commit and says why.
TOKENS = {
    "": 3800,
    "check": 4300,
    "checkpoint": 28_700,
    "config": 19_800,
    "data": 47_500,
    "evaluation": 4000,
    "inference": 7500,
    "models": 65_200,
    "observe": 13_600,
    "plan": 20_100,
    "report": 5900,
    "run": 6500,
    "runtime": 12_400,
    "training": 29_900,
}
UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# What each folder imports of the others. config knows nobody; tools know the rest and are known by
# no other folder.
BELOW = {
    "": {"config"},
    "config": set(),
    "runtime": {"config"},
    "data": {"config", "runtime"},
    "models": {"config", "runtime"},
    "report": {"config"},
    "check": {"checkpoint", "config", "observe", "runtime"},
    "observe": {"config", "models", "runtime"},
    "training": {"config", "data", "models", "runtime"},
    "checkpoint": {"config", "data", "models", "runtime", "training"},
    "plan": {"checkpoint", "config", "data", "models", "observe", "runtime", "training"},
    "inference": {"checkpoint", "config", "data", "models", "runtime", "training"},
    "evaluation": {"config", "data", "inference", "models", "runtime", "training"},
    "run": {
        "checkpoint",
        "config",
        "data",
        "models",
        "observe",
        "plan",
        "report",
        "runtime",
        "training",
    },
}


def folder_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0] if file.parent != SOURCE else ""


def docstring_lines(tree: ast.AST) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_tokens(text: str) -> int:
    """Count the tokens of a file. Python 3.12 splits an f-string into several; it counts as one."""
    docstrings = docstring_lines(ast.parse(text))
    count = 0
    f_strings = 0  # nested f-strings that are open
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_END"):
            f_strings -= 1
            continue
        if kind.endswith("STRING_START"):
            f_strings += 1
            if f_strings > 1:
                continue
        elif f_strings:
            continue
        if token.type not in UNCOUNTED and token.start[0] not in docstrings:
            count += 1
    return count


def test_f_strings_docstrings_and_comments_count_the_same_on_every_python() -> None:
    text = '"""What it does."""\nx = f"{y + 1} {f\'{z}\'}"  # why\n\n\ndef f():\n    """Doc."""\n'
    assert count_tokens(text) == len(["x", "=", "f-string", "def", "f", "(", ")", ":"])


def test_no_folder_and_no_file_exceeds_its_budget() -> None:
    texts = {file: file.read_text() for file in SOURCE.rglob("*.py")}
    lines = {str(file): len(text.splitlines()) for file, text in texts.items()}
    assert not {file: count for file, count in lines.items() if count > LONGEST_FILE}
    used = Counter[str]()
    for file, text in texts.items():
        used[folder_of(file)] += count_tokens(text)
    assert not {folder: count for folder, count in used.items() if count > TOKENS[folder]}, used


def test_only_the_class_of_the_ranks_sets_their_fields() -> None:
    """`ranks.lock = lock` elsewhere would hide from a reader of Ranks who changes it."""
    wrong = []
    for file, tree in trees_of_source_and_recipes():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if re.search(r"\b_?ranks\.", ast.unparse(node)):
                wrong.append(f"{file}:{node.lineno} sets {ast.unparse(node)}")
    assert not wrong


def test_one_function_gathers_objects_of_all_ranks() -> None:
    callers = set[str]()
    for file, tree in trees_of_source_and_recipes():
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if "all_gather_object" in names:
            callers.add(file.name)
    assert callers == {"gather.py"}


@cache
def trees_of_source_and_recipes() -> list[tuple[Path, ast.Module]]:
    files = [*SOURCE.rglob("*.py"), *(REPOSITORY / "recipes").glob("*.py")]
    return [(file, ast.parse(file.read_text())) for file in files]


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
                is_folder = (SOURCE / target).is_dir()
                if is_folder and target != folder_of(file) and target not in BELOW[folder_of(file)]:
                    wrong.append(f"{file.relative_to(SOURCE)} imports {target}")
    assert not wrong


def test_the_files_of_plan_do_not_import_each_other_in_a_circle() -> None:
    imports = dict[str, set[str]]()
    for file in (SOURCE / "plan").glob("*.py"):
        # also imports inside functions
        nodes = ast.walk(ast.parse(file.read_text()))
        modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        imports[f"llama_ft.plan.{file.stem}"] = {
            module for module in modules if module.startswith("llama_ft.plan.")
        }
    # raises CycleError, which names the circle
    order = list(TopologicalSorter(imports).static_order())
    assert order.index("llama_ft.plan.predict") < order.index("llama_ft.plan.fit")
    assert order.index("llama_ft.plan.fit") < order.index("llama_ft.plan.preflight")
