"""Look into a user's Python file without running it: does `file.py:function` exist?"""

import ast
from pathlib import Path

from llama_ft.config.wording import nearest, nearest_file


def python_function_complaint(path: Path, function: str) -> str | None:
    """Say why `path:function` cannot be called.

    Args:
        path: the Python file.
        function: the name behind the colon; empty when there was none.

    Returns:
        What is wrong, or None.
    """
    if not path.is_file():
        return f"no such file.{nearest_file(path)}"
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        return f"line {error.lineno} is not valid Python: {error.msg}."
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    has = f"It defines {', '.join(functions)}." if functions else "It defines no function."
    if not function:
        return f"which function? Write {path}:function. {has}"
    names = _names_bound_by(tree.body)
    if function in names or "*" in names:  # after `from x import *` any name may be there
        return None
    match = nearest(function, functions)
    return f"{path} defines no {function}. {f'Did you mean {match}?' if match else has}"


def _names_bound_by(statements: list[ast.stmt]) -> set[str]:
    """Collect what importing the file would define: functions, imports and assignments, also below if and try."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what is defined inside is not the file's
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return names
