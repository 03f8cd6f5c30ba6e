"""TRL without its requirements, which are those of llama_ft: for benchmarks that import it."""

import subprocess
import sys
from pathlib import Path

TRL = "trl==1.16.0"


def install(folder: Path) -> None:
    """Install TRL into a folder, unless it is there, and let this process import it."""
    if not (folder / "trl").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), TRL], check=True)
    sys.path.append(str(folder))
