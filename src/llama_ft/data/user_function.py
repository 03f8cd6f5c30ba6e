"""A dataset from the user's own Python file: `path/to/file.py:function`, called as llama-recipes calls it."""

import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llama_ft.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


def call_user_function(file: Path, name: str, *arguments: Any) -> "Dataset":
    """Import `file`, call its function `name(*arguments)` and return the datasets.Dataset it made.

    Raises:
        UserError: there is no such file or function, it raised something, or it returned something else.
    """
    import datasets

    function = _find_function(_import_file(file), file, name)
    try:
        result = function(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        split = f" for the split {arguments[-1]}" if arguments else ""
        raise UserError(f"{_place_of(error, file)}: {name} raised {_described(error)}{split}") from error
    if not isinstance(result, datasets.Dataset):
        kind = type(result)
        raise UserError(
            f"{file}:{name} returned a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
            + "; expected a datasets.Dataset.\n(datasets.Dataset.from_list(rows) makes one from a list of dicts)"
        )
    return result


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"{file}: no such file.")
    # A name of its own, so that two files called dataset.py, or one called like a library, do not meet in sys.modules.
    module_name = f"llama_ft_user_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look classes up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(f"{_place_of(error, file)}: cannot be imported: {_described(error)}") from error
    return module


def _find_function(module: ModuleType, file: Path, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    near = difflib.get_close_matches(name, own, n=1)
    hint = f"Did you mean {near[0]}?" if near else "It has: " + (", ".join(own) or "no functions") + "."
    raise UserError(f"{file}: there is no function {name}. {hint}")


def _place_of(error: BaseException, file: Path) -> str:
    """`file:line` of the last line of the user's file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _described(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
