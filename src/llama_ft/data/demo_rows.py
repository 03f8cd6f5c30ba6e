"""Samples of the embedded demo: questions about Python's standard library, answered by its docstrings.

The sources of the running Python are read with `ast`; nothing is imported. The same Python gives the same samples.
"""

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idlelib lib2to3 turtledemo ensurepip pydoc_data __pycache__".split()
)
SHORTEST_ANSWER = 20  # characters; shorter docstrings say nothing ("See above.")
VALIDATION_SHARE = 0.05
QUESTIONS = (
    "What does the {kind} `{name}` do?",
    "Explain the {kind} `{name}` of Python's standard library.",
    "How does Python document the {kind} `{name}`?",
    "Describe the {kind} `{name}`.",
    "What is the {kind} `{name}` for?",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Documented(NamedTuple):
    """A module, class, function or method with its docstring."""

    name: str
    kind: str
    signature: str
    docstring: str


def write_demo_rows(folder: Path) -> dict[str, int]:
    """Write train.jsonl and validation.jsonl (columns instruction, input, output) into `folder`; return their rows."""
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    seen: set[str] = set()
    for item in sorted(documented_items(Path(sysconfig.get_path("stdlib"))), key=lambda item: item.name):
        # One answer under two names (posixpath and ntpath share many) could stand in both splits: keep the first.
        answer = " ".join(item.docstring.lower().split())
        if len(item.docstring) < SHORTEST_ANSWER or answer in seen:
            continue
        seen.add(answer)
        question = QUESTIONS[_stable_hash("question " + item.name) % len(QUESTIONS)]
        instruction = question.format(kind=item.kind, name=item.name)
        row = {"instruction": instruction, "input": item.signature, "output": item.docstring}
        is_held_out = _stable_hash("split " + item.name) / 2**64 < VALIDATION_SHARE
        rows["validation" if is_held_out else "train"].append(json.dumps(row, ensure_ascii=False) + "\n")
    for split, lines in rows.items():  # errors: a docstring may hold half a surrogate pair, which UTF-8 cannot
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", errors="replace")
    return {split: len(lines) for split, lines in rows.items()}


def documented_items(library: Path) -> Iterator[Documented]:
    """Yield all that is public and has a docstring in the Python files under `library` that can be parsed."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or any(_is_private(part) for part in parts):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old files
                module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        yield from _walk(module, name, "module", "")


def _walk(node: ast.Module | ast.ClassDef | Function, name: str, kind: str, signature: str) -> Iterator[Documented]:
    """Yield the node and, for modules and classes, what is defined directly in it."""
    if docstring := ast.get_docstring(node):  # cleaned as inspect.cleandoc does
        yield Documented(name, kind, signature, docstring)
    for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        if isinstance(child, ast.ClassDef) and not _is_private(child.name):
            bases = ", ".join(map(ast.unparse, child.bases))
            yield from _walk(child, f"{name}.{child.name}", "class", f"class {child.name}" + f"({bases})" * bool(bases))
        elif isinstance(child, Function) and not _is_private(child.name):
            prefix = "async def" if isinstance(child, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
            head = f"{prefix} {child.name}({ast.unparse(child.args)}){returns}"
            child_kind = "method" if isinstance(node, ast.ClassDef) else "function"
            yield from _walk(child, f"{name}.{child.name}", child_kind, head)


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def _stable_hash(text: str) -> int:
    """64 bits that are the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big")
