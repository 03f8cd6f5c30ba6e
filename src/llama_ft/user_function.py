"""Functions in a user's file, `path/to/file.py:function`: datasets, optimizers and scores."""

import runpy
import traceback
from collections.abc import Callable
from typing import Any

from llama_ft.config.home import expanded
from llama_ft.errors import StopRequest, UserError, text_of


def load_function(name: str) -> Callable[..., Any]:
    """Import the file of `path/to/file.py:function`. Return its function, whose errors become a
    UserError that names the line of the file. Raises UserError if it does not exist."""
    file, _, function = name.rpartition(":")
    path = str(expanded(file))
    try:
        definition = runpy.run_path(path).get(function)
        if definition is None:
            raise LookupError("no such function")
    except (KeyboardInterrupt, StopRequest):
        raise
    except BaseException as error:
        raise _explained(path, function, error) from error

    def call(*arguments: Any) -> Any:
        try:
            return definition(*arguments)
        except (KeyboardInterrupt, StopRequest):  # of the terminal or a launcher
            raise
        except BaseException as error:
            raise _explained(path, function, error) from error

    return call


def _explained(path: str, function: str, error: BaseException) -> UserError:
    """Return the message about an error. It names the last line of the user's file, which may have
    called a library."""
    place = path
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            place = f"{path}:{frame.lineno}"
    return UserError(f"{place}: {function}: {type(error).__name__}: {text_of(error)}")
