"""How fast ranks exchange tensors: collectives of all ranks and of each node, and point to point
between neighbouring nodes."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from llama_ft.runtime import Ranks

TURNS = 3


class Link(NamedTuple):
    """A measured connection.

    Attributes:
        what: `all-reduce`, `all-gather` or `send`.
        where: which ranks or nodes took part.
        bytes_per_second: of collectives the bus bandwidth, as nccl-tests defines it
            (doc/PERFORMANCE.md there): it does not depend on the number of ranks.
    """

    what: str
    where: str
    bytes_per_second: float


def measure_network(ranks: Ranks, nodes: list[str], nbytes: int) -> list[Link]:
    """Measure all links. All ranks must call it together, and get the same result.

    Args:
        ranks: all ranks.
        nodes: the node of each rank.
        nbytes: size of the tensors.
    """
    if ranks.world_size == 1:
        return []
    everyone = list(range(ranks.world_size))
    links = _measure_group(ranks, everyone, "all ranks", nbytes)
    names = list(dict.fromkeys(nodes))
    members = {name: [rank for rank in everyone if nodes[rank] == name] for name in names}
    if len(names) == 1:
        return links
    for name, group in members.items():
        if len(group) > 1:
            links += _measure_group(ranks, group, f"within {name}", nbytes)
    neighbours = zip(names, [*names[1:], names[0]], strict=True)
    # of two nodes, one direction each; of more, a ring
    for sender, receiver in neighbours:
        rate = _measure_send(ranks, members[sender][0], members[receiver][0], nbytes)
        links.append(Link("send", f"{sender} -> {receiver}", rate))
    return links


def _measure_group(ranks: Ranks, members: list[int], where: str, nbytes: int) -> list[Link]:
    count = len(members)
    group = dist.new_group(members)  # all ranks take part in making it
    numbers = max(1, nbytes // 4 // count) * count
    whole = torch.ones(numbers, dtype=torch.float32, device=ranks.device)
    part = whole[: numbers // count].clone()

    # torch 2.13 deprecates the second name, torch 2.11 lacks the first
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce() -> None:
        dist.all_reduce(whole, group=group)

    def gather() -> None:
        gather_into(whole, part, group=group)

    is_member = ranks.rank in members
    reduce_seconds = _slowest(ranks, reduce if is_member else None)
    gather_seconds = _slowest(ranks, gather if is_member else None)
    if is_member:
        dist.destroy_process_group(group)
    size = whole.nbytes
    share = (count - 1) / count
    return [
        Link("all-reduce", where, 2 * share * size / reduce_seconds),
        Link("all-gather", where, share * size / gather_seconds),
    ]


def _measure_send(ranks: Ranks, sender: int, receiver: int, nbytes: int) -> float:
    tensor = torch.ones(max(1, nbytes // 4), dtype=torch.float32, device=ranks.device)

    def send() -> None:
        dist.send(tensor, receiver)

    def receive() -> None:
        dist.recv(tensor, sender)

    roles = {sender: send, receiver: receive}
    return tensor.nbytes / _slowest(ranks, roles.get(ranks.rank))


def _slowest(ranks: Ranks, work: Callable[[], None] | None) -> float:
    """Return the seconds of the slowest rank, in the best of TURNS after one that opens
    connections. `work` is None on ranks that take no part."""
    best = float("inf")
    for turn in range(TURNS + 1):
        dist.barrier()
        started = time.perf_counter()
        seconds = 0.0
        if work is not None:
            work()
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            seconds = time.perf_counter() - started
        slowest = float(ranks.all_gather_floats(seconds).max())
        if turn > 0:
            best = min(best, slowest)
    return max(best, 1e-9)
