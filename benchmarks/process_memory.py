"""Anonymous memory of a process, for the trainers that throughput.py compares."""

import re
from pathlib import Path


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return RssAnon of a process (see `man 5 proc`), 0 if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0
