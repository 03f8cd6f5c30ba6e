"""Text files that readers see whole."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one move: a reader never sees half of it. Several processes may do so at once."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
