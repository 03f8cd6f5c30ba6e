"""Runs a script with a file as its stdin, and another as its stdout: STDIN STDOUT SCRIPT FLAGS..."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.dup2(os.open(sys.argv[1], os.O_RDONLY), 0)
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), 1)
    sys.stdin = open(0, closefd=False)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as of a script that Python starts
    runpy.run_path(sys.argv[0], run_name="__main__")
