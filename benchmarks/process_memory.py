"""Anonymous memory of a process, for the trainers that throughput.py compares."""

import re
from pathlib import Path


def anonymous_bytes(pid: int | str = "self", ranks: int = 1) -> int:
    """Return RssAnon of a process and its part of RssShmem, which it shares with the other ranks
    (see `man 5 proc`); 0 if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(RssAnon|RssShmem):\s+(\d+) kB$", status, re.MULTILINE))
    kilobytes = int(found.get("RssAnon", 0)) + int(found.get("RssShmem", 0)) // ranks
    return kilobytes * 1024
