"""The flag --for of recipes/export.py."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from llama_ft.config.value_types import STRICT
from llama_ft.errors import UserError
from llama_ft.extensions.serving.rules import read_target


@dataclass(config=STRICT, kw_only=True)
class ServingFlags:
    """For an inference server."""

    for_: str | None = None
    """vllm, sglang, llama.cpp, ollama or transformers, also with a version, such as vllm:0.32: write
    what this server reads and print the command that serves it. What it would ignore is an error.
    An adapter stays an adapter without --merge."""

    # Not a flag: how the server is started, by `finish`
    serving_lines: ClassVar[str] = ""


def check_target(options: Any) -> None:
    """Check --for. A saved adapter is not merged unless --merge says so."""
    read_target(options.for_)
    options.keeps_adapter = options.kind == "adapter" and not options.merge
    if options.keeps_adapter and options.save_dtype != "auto":
        raise UserError("--save_dtype: a saved adapter keeps its precision. Use it with --merge.")


def finish(options: Any, written: Path) -> None:
    """Change what is written for the server, or reject it."""
    # It imports torch, which reading the flags must not.
    from llama_ft.extensions.serving.hand_over import finish_export

    options.serving_lines = finish_export(options, written)


def print_command(options: Any) -> None:
    """Print the command that serves what was written."""
    from llama_ft.runtime.console import log  # imports torch, and flags are read before

    log.info(options.serving_lines)
