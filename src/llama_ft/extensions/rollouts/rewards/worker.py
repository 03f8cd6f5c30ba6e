"""A process that calls the reward functions of users' files.

It imports the standard library and these files only, so that it starts within 0.1 s. It is started
by pool.py, not by multiprocessing, which would import the recipe, and so torch, again. Both
sides send JSON:

    from pool.py: {parent, memory_bytes, cpu_seconds, functions: [[path, name], ...]}
    back:            {problem}, which is empty if all functions were imported
    from pool.py: {function, prompt, answer, sample}
    back:            {values: number or {name: number}}, or {kind, text}
"""

import inspect
import json
import math
import os
import resource
import runpy
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from llama_ft.processes import end_with

PARAMETERS = ("prompt", "answer", "sample")
LONGEST_TEXT = 300  # characters of an error's message
LARGEST_NUMBER = 3.4e38  # of float32, which rounds are stored in
Reply = dict[str, Any]


class WrongFunction(Exception):
    """A function that cannot be a reward."""


def main(descriptor: int) -> None:
    """Import the functions, and answer calls until the other side closes the connection.
    `descriptor`: of the socket to it."""
    connection = Connection(descriptor)
    setup = json.loads(connection.recv_bytes())
    end_with(setup["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file
    if setup["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    functions, problem = _loaded(setup["functions"])
    _send(connection, {"problem": problem})
    process = os.getpid()
    while not problem:
        try:
            call = json.loads(connection.recv_bytes())
        except EOFError:
            return
        _limit_cpu_time(setup["cpu_seconds"])
        path, _ = setup["functions"][call["function"]]
        arguments = [call[name] for name in PARAMETERS]
        reply = _called(functions[call["function"]], path, arguments)
        if os.getpid() != process:  # the function has forked, and this is the copy
            os._exit(0)
        _send(connection, reply)


def _send(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(json.dumps(reply).encode())


def _loaded(names: list[list[str]]) -> tuple[list[Callable[..., Any]], str]:
    """Return the functions, and what is wrong with the first bad one."""
    functions = list[Callable[..., Any]]()
    for path, name in names:
        try:
            functions.append(_load(path, name))
        except WrongFunction as error:
            return functions, f"{path}: {error}"
        except BaseException as error:  # a file may also call sys.exit
            return functions, _explained(path, error)
    return functions, ""


def _load(path: str, name: str) -> Callable[..., Any]:
    module = runpy.run_path(path)
    function = module.get(name)
    if function is None:
        raise WrongFunction(f"has no function {name}.")
    if not callable(function):
        raise WrongFunction(f"{name} is a {type(function).__name__}; expected a function.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise WrongFunction(f"{name} is async or a generator; expected a plain function.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C
        return function
    try:
        signature.bind(*PARAMETERS)
    except TypeError:
        expected = ", ".join(PARAMETERS)
        raise WrongFunction(
            f"{name} has the parameters {signature}; expected ({expected})."
        ) from None
    return function


def _limit_cpu_time(seconds: int) -> None:
    """Limit the CPU time of the next call. The kernel counts that of the whole process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def _called(function: Callable[..., Any], path: str, arguments: list[Any]) -> Reply:
    """Return what a function returns for an answer, or why it gives no reward."""
    try:
        value = function(*arguments)
        if value is None:
            return {"kind": "none", "text": "returned None"}
        if isinstance(value, dict) and value:
            return {"values": {_name(name): _number(part) for name, part in value.items()}}
        return {"values": _number(value)}
    except WrongFunction as error:
        return {"kind": "value", "text": str(error)}
    except MemoryError as error:
        return {"kind": "memory", "text": _explained(path, error)}
    except BaseException as error:  # a function may also call sys.exit
        return {"kind": "error", "text": _explained(path, error)}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise WrongFunction(f"the name {_shown(name)}; expected a word, such as format")
    return name


def _number(value: Any) -> float:
    """Return a number as a float: any type that converts to it but text, such as numpy's."""
    if hasattr(value, "__float__"):
        number = float(value)
        if abs(number) <= LARGEST_NUMBER:  # not NaN, either
            return number
    raise WrongFunction(_shown(value))


def _shown(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


def _explained(path: str, error: BaseException) -> str:
    """Return an exception with the last line of the user's file, which may have called a library."""
    place = path
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            place = f"{path}:{frame.lineno}"
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a class of the user's
        text = "(its message raises an error)"
    return f"{place}: {type(error).__name__}: {text}"[:LONGEST_TEXT]
