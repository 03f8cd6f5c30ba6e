"""output_dir/facts.json: facts about a run for report.html, in addition to its metrics."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llama_ft.errors import reason
from llama_ft.masking import mask_secrets
from llama_ft.processes import replace_text, typed_command
from llama_ft.runtime.console import log

FACTS_FILE = "facts.json"
CHECKOUT = Path(__file__).resolve().parents[3]


class RunMetadata:
    """Keeps facts.json up to date, in an existing directory. Secrets are masked.

    A run that resumes in its directory keeps the file, and with it the responses from before
    fine-tuning. Only rank 0 is `enabled` to write.
    """

    def __init__(self, output_dir: Path, enabled: bool = True) -> None:
        self.path = output_dir / FACTS_FILE
        self._enabled = enabled
        self._facts = read_facts(self.path) if enabled and self.path.exists() else {}

    def add(self, **facts: Any) -> None:
        """Merge `facts`, plain values, into the file: dicts key by key; any other value replaces
        the old one.

        If the file cannot be written, a warning is logged.
        """
        if not self._enabled:
            return
        for key, value in masked(facts).items():
            old = self._facts.get(key)
            is_merged = isinstance(value, dict) and isinstance(old, dict)
            self._facts[key] = old | value if is_merged else value
        self._write()

    def add_pictures(self, pictures: dict[str, str]) -> None:
        """Add pictures of samples: name -> data: URL, in which nothing is masked. The next facts write
        them into the file."""
        self._facts["pictures"] = self._facts.get("pictures", {}) | pictures

    def _write(self) -> None:
        try:
            # ASCII: a response may hold half a surrogate pair.
            replace_text(self.path, json.dumps(self._facts, default=str) + "\n")
        except OSError as error:
            log.warning(
                f"{self.path} could not be written, so report.html will lack its contents: {error.strerror}"
            )

    def add_samples(
        self, when: str, samples: Sequence[dict[str, Any]], kind: str = "samples"
    ) -> None:
        """Add responses: question, answer and, if known, reference and score. They replace earlier
        ones of the same kind and moment."""
        if not samples:
            return
        earlier = self._facts.get(kind, [])
        others = [old for old in earlier if old.get("when") != when]
        added = [{"when": when, **sample} for sample in samples]
        self.add(**{kind: [*others, *added]})


def read_facts(path: Path) -> dict[str, Any]:
    """Return the content of facts.json. A corrupted file does not end a run: it is logged, and
    the run starts a new one."""
    try:
        facts = json.loads(path.read_text())
        samples = [*facts.get("samples", []), *facts.get("scored", [])]
        if not all(isinstance(sample.get("when"), str) for sample in samples):
            raise ValueError("samples without a moment")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        log.warning(f"{path} is corrupted ({reason(error)}), so a new one is written.")
        return {}
    return dict(facts)


def masked(value: Any) -> Any:
    """Return a copy of plain values, dicts and lists in which texts that look like secrets are
    replaced by ***."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        names = {key: mask_secrets(str(key)) for key in value}
        return {names[key]: masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return value


def environment(versions: dict[str, str], layout: str) -> dict[str, str]:
    """Return the hardware, the command, the versions of Python and of libraries, and `layout`, the
    text about the ranks; name -> text."""
    facts = {
        "command": typed_command(),
        "ranks": layout,
        **versions,
        "host": f"{socket.gethostname()}, {os.cpu_count()} cores",
        "commit": git_commit(),
    }
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        facts["GPUs"] = f"{gpus}, CUDA {torch.version.cuda}"
    return facts


def git_commit() -> str:
    """Return the short commit of the checkout of the script, or else of this package, with ",
    changed" if tracked files differ from it. No other information of git, such as remotes, is
    read."""
    describe = "describe --always --abbrev=12 --exclude=*".split()  # --exclude: no tags
    for folder in (Path(sys.argv[0]).resolve().parent, CHECKOUT):
        command = ["git", "-C", str(folder), *describe, "--dirty=, changed"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            finished = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
            return finished.stdout.strip()
    return "unknown"
