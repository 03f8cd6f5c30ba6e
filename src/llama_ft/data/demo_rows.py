"""Rows of the embedded demo: questions about Python's standard library, answered by its docstrings.

The sources of the running Python are read with `ast`; nothing is imported. The same Python gives the same rows.
"""

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Documented:
    """A module, class, function or method with its docstring."""

    name: str
    kind: str
    signature: str
    docstring: str


def write_demo_rows(folder: Path) -> dict[str, int]:
    """Write train.jsonl and validation.jsonl (columns instruction, input, output) into `folder`; return their rows."""
    counts = {"train": 0, "validation": 0}
    seen: set[str] = set()
    with (
        # errors: a docstring may hold half a surrogate pair, which UTF-8 cannot
        open(folder / "train.jsonl", "w", encoding="utf-8", errors="replace") as train,
        open(folder / "validation.jsonl", "w", encoding="utf-8", errors="replace") as validation,
    ):
        for item in sorted(documented_items(Path(sysconfig.get_path("stdlib"))), key=lambda item: item.name):
            # One answer under two names (posixpath and ntpath share many) could stand in both splits: keep the first.
            answer = " ".join(item.docstring.lower().split())
            if len(item.docstring) < SHORTEST_ANSWER or answer in seen:
                continue
            seen.add(answer)
            split, file = ("validation", validation) if _is_validation(item.name) else ("train", train)
            file.write(json.dumps(_row(item), ensure_ascii=False) + "\n")
            counts[split] += 1
    return counts


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


def _walk(node: ast.Module | Definition, name: str, kind: str, signature: str) -> Iterator[Documented]:
    """Yield the node and, for modules and classes, what is defined directly in it."""
    if docstring := ast.get_docstring(node):  # cleaned as inspect.cleandoc does
        yield Documented(name, kind, signature, docstring)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if not isinstance(child, Definition) or _is_private(child.name):
            continue
        if isinstance(child, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, child.bases))
            yield from _walk(
                child, f"{name}.{child.name}", "class", f"class {child.name}" + (f"({bases})" if bases else "")
            )
        else:
            child_kind = "method" if isinstance(node, ast.ClassDef) else "function"
            yield from _walk(child, f"{name}.{child.name}", child_kind, _function_signature(child))


def _function_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def _row(item: Documented) -> dict[str, str]:
    question = QUESTIONS[_stable_hash("question " + item.name) % len(QUESTIONS)]
    instruction = question.format(kind=item.kind, name=item.name)
    return {"instruction": instruction, "input": item.signature, "output": item.docstring}


def _is_validation(name: str) -> bool:
    return _stable_hash("split " + name) / 2**64 < VALIDATION_SHARE


def _stable_hash(text: str) -> int:
    """64 bits that are the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big")
