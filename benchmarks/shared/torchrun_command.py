"""The command that starts ranks, for all benchmarks."""

import sys
from pathlib import Path


def torchrun_command(ranks: int, python: Path | str = sys.executable) -> list[str]:
    """Return the words of torchrun on one machine, up to the script."""
    launcher = [str(python), "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", str(ranks)]
