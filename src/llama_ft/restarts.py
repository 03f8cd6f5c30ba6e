"""torchrun's restarts: its agent, the parent of a node's ranks, starts them all again when one has failed."""

import os
import signal


def attempt() -> int:
    """How often this node's ranks have failed and been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def may_be_restarted() -> bool:
    """Whether an earlier attempt of this job may have been here before: another node's failures are not counted."""
    restarts, nodes = os.environ.get("TORCHELASTIC_MAX_RESTARTS"), os.environ.get("GROUP_WORLD_SIZE")
    return int(restarts or 0) > 0 or int(nodes or 1) > 1


def end_restarts() -> None:
    """Have this node's agent end its ranks and itself, if it would start them again."""
    if attempt() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        os.kill(os.getppid(), signal.SIGTERM)
