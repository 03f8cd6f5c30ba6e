"""What a recipe's main function calls first: the command line in, a checked configuration out."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from llama_ft import restarts
from llama_ft.config.help import help_text
from llama_ft.config.load import load
from llama_ft.config.sections import Config
from llama_ft.errors import UserError

SECONDS_TO_BE_ENDED = 20.0
SECONDS_BETWEEN_LOOKS = 0.5


def parse_command_line(argv: list[str], *, description: str, demo_recipe: Path) -> tuple[Config, dict[str, str]]:
    """Read and check what the command line and the recipe file say; leave with a message if anything is wrong.

    Args:
        argv: the words after the script's name.
        description: what the script does, for --help.
        demo_recipe: the recipe to take when neither --config nor a model nor a dataset is given.

    Returns:
        The configuration, and where each setting that was set was set: dotted name -> `--lr` or `configs/x.yaml:12`.

    Raises:
        SystemExit: 0 after --help, 2 after the user's mistakes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback out of an import; runtime.start takes it over
    if "--help" in argv or "-h" in argv:
        if _rank() == 0:
            print(help_text(description, script=sys.argv[0]), end="")
        sys.exit(0)
    try:
        return load(argv, demo_recipe)
    except UserError as error:
        exit_with(error)


def exit_with(error: UserError) -> NoReturn:
    """Print the user's mistakes once, on rank 0, and leave with exit code 2; torchrun does not try again.

    The other ranks see the same mistakes and wait to be ended: if one of them left first, torchrun would end rank 0
    before it has spoken. Who is still here after 20 s sees what rank 0 does not (a file that is missing on this node
    only), and says so.
    """
    speaks = _rank() == 0 or not _rank_0_leaves()
    if speaks:
        print(error, file=sys.stderr, flush=True)
    if speaks or os.environ.get("LOCAL_RANK") == "0":  # each node has an agent of its own
        restarts.end_restarts()
    sys.exit(2)


def _rank_0_leaves() -> bool:
    """Wait until the agent of rank 0's node is gone, whose port the ranks would meet at; False: it stays."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + SECONDS_TO_BE_ENDED
    while time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        try:
            if has_agent:
                socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 1.0).close()
        except ConnectionError:
            return True
        except OSError:  # too slow an answer is none
            pass
    return False


def _rank() -> int:
    """Return this process's rank as torchrun tells it, 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)
