"""Anonymous memory of a process, for the trainers that throughput.py compares."""

import re
from pathlib import Path

MEMORY_FILE = re.compile(r"^(\w+)-(\w+) .*/memfd:llama_ft", re.MULTILINE)


def anonymous_bytes(pid: int | str = "self", ranks: int = 1) -> int:
    """Return RssAnon of a process (see `man 5 proc`), and its part of the memory that the ranks of
    llama_ft share; 0 if it has ended."""
    process = Path(f"/proc/{pid}")
    status = (process / "status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        return 0
    shared = 0
    for start, end in MEMORY_FILE.findall((process / "maps").read_text()):
        shared += int(end, 16) - int(start, 16)
    return int(found.group(1)) * 1024 + shared // ranks
