"""Try the machines before a run: `recipes/check.py` measures every rank, the network between them
and the disk of --output_dir."""

from llama_ft.check.disk import DiskTrial, try_disk
from llama_ft.check.machine import RankFacts, measure_rank
from llama_ft.check.network import Link, measure_network
from llama_ft.check.result import CheckResult

__all__ = [
    "CheckResult",
    "DiskTrial",
    "Link",
    "RankFacts",
    "measure_network",
    "measure_rank",
    "try_disk",
]
