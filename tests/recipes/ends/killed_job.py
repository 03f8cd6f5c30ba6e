"""The recipe with the flags given after a path: each rank is killed, as by kill -9, once something
has that path."""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "finetuning.py"


def kill_at(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=kill_at, args=(Path(sys.argv.pop(1)),), daemon=True).start()
    runpy.run_path(str(RECIPE), run_name="__main__")
