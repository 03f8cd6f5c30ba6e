"""The table of a check, and what is wrong."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from llama_ft.config.wording.messages import size_text
from llama_ft.door import Trial
from llama_ft.errors import plural
from llama_ft.extensions.check.disk import DiskTrial
from llama_ft.extensions.check.machine import RankFacts
from llama_ft.extensions.check.network import Link

LEAST_FREE = 0.9  # share of a GPU's memory: a desktop takes a few percent, another process more
LEAST_RATE = 0.8  # of the median: GPUs of one type differ by a few percent
LEAST_LINK = 0.5  # of the median
MOST_SECONDS = 2.0  # between clocks: logs of several nodes are compared
UNKNOWN = "-"


@dataclass(frozen=True)
class CheckResult:
    """All ranks.

    Attributes:
        output_dir: the directory that was tried.
        facts, disks: one of each rank.
        links: see `measure_network`.
        trials: of each rank, what extensions have tried.
    """

    output_dir: str
    facts: Sequence[RankFacts]
    disks: Sequence[DiskTrial]
    links: Sequence[Link]
    trials: Sequence[Sequence[Trial]] = ()

    def table(self) -> str:
        """Return the measured values as lines: a row per rank, the links, and the versions."""
        head = ["rank", "node", "device", "free", "host memory", "matmul", "disk", "free on disk"]
        head += [trial.title for trial in self._trials_of(0)]
        rows = [head]
        for facts, disk in zip(self.facts, self.disks, strict=True):
            rows.append(
                [
                    str(facts.rank),
                    facts.node,
                    facts.device,
                    _size(facts.free_bytes),
                    _size(facts.host_bytes),
                    _rate(facts.flops_per_second),
                    f"{disk.bytes_per_second / 1e6:,.0f} MB/s"
                    if disk.bytes_per_second
                    else UNKNOWN,
                    _size(disk.free_bytes or None),
                    *(trial.result for trial in self._trials_of(facts.rank)),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        for link in self.links:
            lines.append(f"{link.what}, {link.where}: {link.bytes_per_second / 1e9:.3g} GB/s")
        usual = {name: value for (name, value), _ in reversed(self._versions().most_common())}
        lines.append(", ".join(f"{name} {value}" for name, value in sorted(usual.items())))
        return "\n".join(lines)

    def problems(self) -> list[str]:
        """Return one text per problem: which rank, node or link, and what to do."""
        return [
            *self._disk_problems(),
            *self._trial_problems(),
            *self._version_problems(),
            *self._memory_problems(),
            *self._slow_ranks(),
            *self._slow_links(),
            *self._wrong_clocks(),
        ]

    def _where(self, has: Callable[[int], bool]) -> str:
        """Name the ranks for which `has` is true, by node."""
        nodes: dict[str, list[str]] = {}
        for facts in self.facts:
            if has(facts.rank):
                nodes.setdefault(facts.node, []).append(str(facts.rank))
        texts = [f"rank {', '.join(ranks)} on {node}" for node, ranks in nodes.items()]
        return "; ".join(texts)

    def _disk_problems(self) -> list[str]:
        counts = Counter(disk.problem for disk in self.disks if disk.problem)
        problems = []
        for problem in counts:
            where = self._where(lambda rank, text=problem: self.disks[rank].problem == text)  # type: ignore[misc]
            problems.append(f"--output_dir {self.output_dir}: {problem}: {where}.")
        if not problems and not all(disk.is_locked_for_others for disk in self.disks):
            where = self._where(lambda rank: not self.disks[rank].is_locked_for_others)
            problems.append(
                f"--output_dir {self.output_dir}: has no locks (flock): {where}.\n"
                "Two runs could write there at the same time. Give each run a directory of its own."
            )
        return problems

    def _trials_of(self, rank: int) -> Sequence[Trial]:
        return self.trials[rank] if self.trials else ()

    def _trial_problems(self) -> list[str]:
        problems = [[trial.problem for trial in trials] for trials in self.trials]
        different = dict.fromkeys(itertools.chain.from_iterable(problems))
        return [
            f"{problem}: {self._where(lambda rank, text=problem: text in problems[rank])}."  # type: ignore[misc]
            for problem in different
            if problem
        ]

    def _versions(self) -> Counter[tuple[str, str]]:
        return Counter(pair for facts in self.facts for pair in facts.versions.items())

    def _version_problems(self) -> list[str]:
        counts = self._versions()
        problems = []
        for name in dict.fromkeys(name for name, _ in counts):
            values = {value: count for (key, value), count in counts.items() if key == name}
            usual = max(values, key=lambda value: values[value])
            for value in values.keys() - {usual}:
                where = self._where(
                    lambda rank, key=name, other=value: (  # type: ignore[misc]
                        self.facts[rank].versions.get(key) == other
                    )
                )
                problems.append(f"{name} is {value}: {where}. The others have {usual}.")
        return problems

    def _memory_problems(self) -> list[str]:
        problems = []
        for facts in self.facts:
            if facts.free_bytes is None or facts.total_bytes is None:
                continue
            share = facts.free_bytes / facts.total_bytes
            if share < LEAST_FREE:
                problems.append(
                    f"rank {facts.rank} on {facts.node}: only {share:.0%} of its GPU's memory is free. "
                    "Another process uses it: nvidia-smi lists them."
                )
        return problems

    def _slow_ranks(self) -> list[str]:
        # cores of a CPU are shared with whatever else runs
        gpus = [facts for facts in self.facts if facts.total_bytes is not None]
        usual = median(facts.flops_per_second for facts in gpus) if gpus else 0.0
        return [
            f"rank {facts.rank} on {facts.node}: a matmul has {facts.flops_per_second / usual:.0%} of the "
            "median rate. All ranks would wait for it in every step."
            for facts in gpus
            if facts.flops_per_second < LEAST_RATE * usual
        ]

    def _slow_links(self) -> list[str]:
        problems = []
        for what in dict.fromkeys(link.what for link in self.links):
            # links of all ranks include the network, those of a node do not
            alike = [link for link in self.links if link.what == what and link.where != "all ranks"]
            if not alike:
                continue
            usual = median(link.bytes_per_second for link in alike)
            for link in alike:
                if link.bytes_per_second < LEAST_LINK * usual:
                    share = link.bytes_per_second / usual
                    problems.append(f"{what}, {link.where}: {share:.0%} of the median bandwidth.")
        return problems

    def _wrong_clocks(self) -> list[str]:
        usual = median(facts.clock for facts in self.facts)
        nodes = dict.fromkeys(
            (facts.node, round(facts.clock - usual))
            for facts in self.facts
            if abs(facts.clock - usual) > MOST_SECONDS
        )
        return [
            f"{node}: its clock differs by {plural(seconds, 'second')}." for node, seconds in nodes
        ]


def _rate(flops_per_second: float) -> str:
    tera = flops_per_second / 1e12
    return f"{tera:,.0f} TFLOP/s" if tera >= 10 else f"{1000 * tera:,.0f} GFLOP/s"


def _size(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else size_text(nbytes)
