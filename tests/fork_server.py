"""The process that all forks of forked.py come from: python fork_server.py LISTENER

It imports what scripts need (preloaded.py) at its first connection. A connection is a process: the
client sends a line with the words of a script, its variables and the file of its output. It gets a
line with the process's number, and at its end one with its exit code and CPU seconds. The server
ends with its standard input, which the tests hold open."""

import atexit
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a process for every connection, and return in each of them what it is to do. None if
    the tests have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    wake_up, woken = socket.socketpair()
    wake_up.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    connections: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (listener, wake_up, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if sys.stdin in ready:
                return None
            if wake_up in ready:
                wake_up.recv(65536)
                report_ended(connections)
            if listener in ready:
                connection, _ = listener.accept()
                importlib.import_module("preloaded")
                pid = os.fork()
                if pid == 0:
                    break
                answer(connection, str(pid))
                connections[pid] = connection
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for inherited in (*connections.values(), listener, wake_up, woken):
        inherited.close()
    with connection, connection.makefile() as lines:
        return json.loads(lines.readline())


def report_ended(connections: dict[int, socket.socket]) -> None:
    """Answer with the exit codes of the processes that have ended."""
    while connections:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        seconds = usage.ru_utime + usage.ru_stime
        with connections.pop(pid) as connection:
            answer(connection, f"{os.waitstatus_to_exitcode(status)} {seconds}")


def answer(connection: socket.socket, line: str) -> None:
    with suppress(OSError):  # the test may have ended
        connection.sendall(f"{line}\n".encode())


def run_script(words: list[str], variables: dict[str, str], output: str) -> int:
    """Run a script as the interpreter would, and return its exit code."""
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(exit_code: int) -> None:
    """End as the interpreter does, but without taking every module apart: 0.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    # Triton's bindings would report all that gc.freeze has kept as leaked, hundreds of lines, if the
    # server took its modules apart.
    end(0 if request is None else run_script(**request))
