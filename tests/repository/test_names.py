"""Names say what a thing is. "found" says that something was found, and not what."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from forked import REPOSITORY

# participles that stood for results, settings and lists
NOT_NOUNS = {"asked", "found", "kept", "made", "wanted"}


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all variables, parameters, attributes, functions and classes that a file
    defines or uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name


def files() -> Iterator[Path]:
    for folder in ("src", "recipes"):
        yield from (REPOSITORY / folder).rglob("*.py")


def test_no_participle_is_the_name_of_a_thing() -> None:
    riddles = []
    for file in files():
        for line, name in named(ast.parse(file.read_text())):
            if name.strip("_").lower() in NOT_NOUNS:
                riddles.append(f"{file.relative_to(REPOSITORY)}:{line} {name}")
    assert not riddles


def test_the_check_sees_all_kinds_of_names() -> None:
    text = "def found(kept, *, _asked=1):\n    made = self.wanted\nclass _Found: pass\n"
    names = {name for _, name in named(ast.parse(text))}
    assert names >= {"found", "kept", "_asked", "made", "wanted", "_Found"}


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict[str, list[str]](list)
    for file in files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(REPOSITORY)}:{node.lineno}")
    assert len(places) > 100
    assert not [lines for lines in places.values() if len(lines) > 1]
