"""torchrun's restarts, as far as a process sees them before torch is imported.

torchrun's agent is the parent of the ranks of one node. It starts them all again when one has failed, up to
--max_restarts times, whatever the exit code was.
"""

import os
import signal
from pathlib import Path

AGENT_NAME = "pt_elastic"  # torch.distributed.run gives its main thread this name


def attempt() -> int:
    """How often this node's ranks have failed and been started again. Restarts that another node caused are not in it:
    see `may_be_restarted`."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def may_be_restarted() -> bool:
    """Whether an earlier attempt of this job may have been here before, even if `attempt` is 0."""
    restarts, nodes = os.environ.get("TORCHELASTIC_MAX_RESTARTS"), os.environ.get("GROUP_WORLD_SIZE")
    return int(restarts or 0) > 0 or int(nodes or 1) > 1


def end_restarts() -> None:
    """Have this node's agent end its ranks and itself, if it would start them again.

    It takes no other word from a rank than SIGTERM, and then leaves with exit code 1. A rank that is started in another
    way than as a child or grandchild of the agent on Linux cannot tell it, and is tried again.
    """
    if attempt() >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        return
    agent = _agent()
    if agent is not None:
        os.kill(agent, signal.SIGTERM)


def _agent() -> int | None:
    """Process id of the nearest ancestor that is an agent: a rank may be wrapped in a script of the user's."""
    ancestor = os.getppid()
    try:
        while ancestor > 1:
            facts = dict(line.split(":\t", 1) for line in Path(f"/proc/{ancestor}/status").read_text().splitlines())
            if facts["Name"] == AGENT_NAME:
                return ancestor
            ancestor = int(facts["PPid"])
    except (OSError, KeyError, ValueError):
        pass  # no /proc, or one that hides others' processes
    return None
