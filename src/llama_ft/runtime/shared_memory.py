"""Memory that ranks on one host share, and signals between them.

Over gloo a tensor crosses from rank to rank through a socket: the kernel copies it twice, and gloo's
threads take the cores on which the ranks compute.
"""

import errno
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from llama_ft.config.wording.messages import size_text
from llama_ft.errors import RunFailure
from llama_ft.runtime.rendezvous import gather

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESS_NAMESPACE = Path("/proc/self/ns/pid")
TOKEN_BYTES = 16
SIZE = struct.Struct("q")


class _Offer(NamedTuple):
    """What the others need to open a rank's descriptors."""

    host: tuple[str, str]  # where the process id is valid
    process: int
    blocks: list[int]
    token: bytes  # random, at the start of the first block
    writers: dict[int, int]  # for each other rank of the group, where it writes its signals


class SharedMemory:
    """Blocks of memory that all ranks of a group have mapped. They belong to no file, so the kernel
    frees them when no rank uses them any more, however the ranks have ended. Linux only. `open` makes
    one.

    Attributes:
        signals_sent: by this process, which shows its progress.
        in_use: all of this process. Another set replaces it: other threads iterate over it.
    """

    signals_sent = 0
    in_use: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()

    def __init__(
        self,
        ranks: int,
        opened: "_Opened",
        readers: dict[int, int],
        descriptors: ExitStack,
    ) -> None:
        self._ranks = ranks
        self._blocks = opened.blocks
        self._maps: list[mmap.mmap | None] = [None] * len(self._blocks)
        self._readers = readers
        self._writers = opened.writers
        SharedMemory.in_use = SharedMemory.in_use | {self}
        weakref.finalize(self, descriptors.close)

    @classmethod
    def open(cls, group: dist.ProcessGroup, blocks: int) -> Self | None:
        """Return `blocks` blocks if all ranks of the group run on one host and may open each other's
        descriptors; else None, on all ranks. All ranks call it together."""
        rank = group.rank()
        offer = None
        memory = list[int]()
        token = b""
        readers = dict[int, int]()
        writers = dict[int, int]()
        with ExitStack() as descriptors, ExitStack() as offered:  # descriptors to close
            with suppress(OSError, AttributeError):  # AttributeError: not Linux
                if rank == 0:
                    for _ in range(blocks):
                        memory.append(os.memfd_create("llama_ft"))
                        offered.callback(os.close, memory[-1])
                    token = os.urandom(TOKEN_BYTES)
                    os.pwrite(memory[0], token, 0)
                for other in range(group.size()):
                    if other != rank:
                        readers[other], writers[other] = os.pipe()
                        descriptors.callback(os.close, readers[other])
                        # Without a writer here, a reader sees when its peer ends.
                        offered.callback(os.close, writers[other])
                host = (BOOT_ID.read_text(), os.readlink(PROCESS_NAMESPACE))
                offer = _Offer(host, os.getpid(), memory, token, writers)
            offers = gather(offer, group)
            opened = _open_offered(offers, rank, descriptors)
            is_open = gather(opened is not None, group)
            if opened is None or not all(is_open):
                return None
            return cls(group.size(), opened, readers, descriptors.pop_all())

    def tensor(self, block: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `count` numbers of a block. The block grows as needed."""
        needed = count * dtype.itemsize
        if needed == 0:
            return torch.empty(0, dtype=dtype)
        mapped = self._maps[block]
        if mapped is None or len(mapped) < needed:
            descriptor = self._blocks[block]
            if os.fstat(descriptor).st_size < needed:  # another rank may have been here first
                enlarge(descriptor, needed)
            mapped = mmap.mmap(descriptor, needed)
            self._maps[block] = mapped
        return torch.frombuffer(mapped, dtype=dtype, count=count)

    def part_bytes(self) -> int:
        """Return the size of all blocks over the number of ranks."""
        return sum(len(mapped) for mapped in self._maps if mapped is not None) // self._ranks

    def signal(self, nbytes: int) -> None:
        """Tell every other rank that this one has come here, with a tensor of so many bytes. Raises
        RuntimeError if one has ended."""
        SharedMemory.signals_sent += 1
        for other, descriptor in self._writers.items():
            try:
                os.write(descriptor, SIZE.pack(nbytes))
            except BrokenPipeError as error:
                raise _ended(other) from error

    def wait(self, nbytes: int) -> None:
        """Wait for the next signal of every other rank. What they wrote before it can be read then.
        Raises RuntimeError if one has ended, or has a tensor of another size."""
        for other, descriptor in self._readers.items():
            received = os.read(descriptor, SIZE.size)
            if not received:
                raise _ended(other)
            (theirs,) = SIZE.unpack(received)
            if theirs != nbytes:
                raise RuntimeError(
                    f"Ranks exchange different tensors: one of {nbytes} bytes here, and one of {theirs} "
                    f"bytes on rank {other} of the group."
                )


class _Opened(NamedTuple):
    blocks: list[int]
    writers: dict[int, int]


def _open_offered(
    offers: Sequence[_Offer | None], rank: int, descriptors: ExitStack
) -> _Opened | None:
    """Open what the ranks of the group offer to this one. Return None if that is not possible."""
    usable = [offer for offer in offers if offer is not None]
    hosts = {offer.host for offer in usable}
    if len(usable) < len(offers) or len(hosts) > 1:
        return None

    def open_one(process: int, descriptor: int, how: int) -> int:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", how)
        descriptors.callback(os.close, opened)
        return opened

    with suppress(OSError):
        first = usable[0]
        blocks = [open_one(first.process, block, os.O_RDWR) for block in first.blocks]
        # Copies of a virtual machine can have equal hosts and processes.
        if os.pread(blocks[0], TOKEN_BYTES, 0) != first.token:
            return None
        writers = {}
        for other, offer in enumerate(usable):
            if other != rank:
                writers[other] = open_one(offer.process, offer.writers[rank], os.O_WRONLY)
        return _Opened(blocks, writers)
    return None


def enlarge(descriptor: int, size: int) -> None:
    """Give a block a size. Raises MemoryError if the host lacks the memory, or RunFailure if a limit
    of the process is too low: no file of the run is the cause."""
    what = f"memory that ranks share ({size_text(size)})"
    try:
        os.truncate(descriptor, size)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise RunFailure(
                f"{what}: is larger than a file may be. Raise the limit: ulimit -f unlimited."
            ) from error
        raise MemoryError(f"{what}: {error.strerror}") from error


def _ended(rank: int) -> RuntimeError:
    return RuntimeError(f"Connection closed by rank {rank} of the group.")
