"""torchrun's restarts, as far as a process sees them before torch is imported.

torchrun's agent is the parent of the ranks of one node. It starts them all again when one has failed, up to
--max_restarts times, whatever the exit code was.
"""

import os
import signal


def attempt() -> int:
    """How often this node's ranks have failed and been started again. Restarts that another node caused are not in it:
    see `may_be_restarted`."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def may_be_restarted() -> bool:
    """Whether an earlier attempt of this job may have been here before, even if `attempt` is 0."""
    restarts, nodes = os.environ.get("TORCHELASTIC_MAX_RESTARTS"), os.environ.get("GROUP_WORLD_SIZE")
    return int(restarts or 0) > 0 or int(nodes or 1) > 1


def end_restarts() -> None:
    """Have this node's agent end its ranks and itself, if it would start them again; it takes no other word from a rank
    than SIGTERM. An agent that is not the parent, as of a rank inside a shell script, tries again."""
    if attempt() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        os.kill(os.getppid(), signal.SIGTERM)
