"""The command line of recipes/export.py."""

import json
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

from huggingface_hub import constants, get_token
from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft import door
from llama_ft.config.home import expanded
from llama_ft.config.paths import (
    RUN_MARKER,
    base_model_of,
    missing_run,
    model_dir_problem,
    model_problem,
)
from llama_ft.config.reading.tool_flags import check, read, with_extensions
from llama_ft.config.value_types import STRICT, Size
from llama_ft.errors import UserError

RECORDED_INPUTS = ("model_name", "tokenizer_name", "from_peft_checkpoint")


@dataclass(config=STRICT, kw_only=True)
class ExportFlags:
    """Flags of recipes/export.py."""

    paths: list[str] = Field(default_factory=list)
    """CHECKPOINT OUT: a checkpoint, a run's directory (its best checkpoint after early stopping,
    else the newest valid one) or a saved adapter, which is merged; and the directory that is
    written."""

    merge: bool = False
    """LoRA: write a whole model with the adapter merged into it."""

    base_model: str | None = None
    """Directory or Hub name of the unquantized base model; if not given, what the run or the
    adapter names."""

    tokenizer_name: str | None = None
    """Directory or Hub name of another tokenizer."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of what is written; auto: the base model's own, tensor by tensor; adapters as they
    were trained."""

    max_shard_size: Size = "5GB"
    """Maximum size of one weights file."""

    overwrite: bool = False
    """Replace the model that OUT already holds."""

    push_to_hub: str | None = None
    """OWNER/NAME: then upload OUT to this Hugging Face repository, with the token of HF_TOKEN or
    `hf auth login`."""

    private: bool = False
    """With --push_to_hub: a private repository."""

    # Not flags: derived from the others, or set by a check of an extension.
    keeps_adapter: ClassVar[bool] = False  # copy a saved adapter; else it is merged
    source: ClassVar[Path]
    out: ClassVar[Path]
    kind: ClassVar[Literal["checkpoint", "run", "adapter"] | None]


def read_export_flags(argv: list[str], description: str) -> ExportFlags:
    """Return the flags with resolved `source`, `out`, `kind` and `base_model`. Raises UserError
    with all errors."""
    aliases = {"dtype": "save_dtype"}
    flags = with_extensions("export", ExportFlags)
    options, _, errors = read(argv, flags, description, aliases)
    if len(options.paths) != 2:
        raise UserError(
            *errors,
            "CHECKPOINT and OUT are needed: what is read, and the directory that is written.",
        )
    source, out = options.paths
    options.source = expanded(source)
    options.out = expanded(out).absolute()
    options.kind = export_kind(options.source)
    for check_flags in door.checks_of("export", options):
        try:
            check_flags(options)
        except UserError as error:
            errors += error.messages
    if options.kind is None:
        problem = "is neither a checkpoint, nor a run's directory, nor an adapter."
        if not options.source.exists():
            problem = missing_run(options.source)
        elif not options.source.is_dir():
            problem = "is a file; expected a directory."
        raise UserError(*errors, f"{options.source}: {problem}")
    if options.kind == "adapter" and not options.base_model:
        options.base_model = base_model_of(source)
    recorded = recorded_inputs(options.source)
    base = options.base_model or recorded.get("model_name")
    base_problem = model_problem(base) if base else None
    if base_problem:
        errors.append(f"{source} (--base_model overrides it): base model {base}: {base_problem}")
    # what --overwrite must not delete
    inputs = {
        "CHECKPOINT": source,
        "its base model": base,
        "--tokenizer_name": options.tokenizer_name,
        **recorded,
    }
    out_problem = model_dir_problem(out, options.overwrite, inputs)
    is_merged = options.merge or (options.kind == "adapter" and not options.keeps_adapter)
    if is_merged and _is_adapter_of_run(options.out):
        out_problem = "is a run's adapter; a merged model would replace it. Choose another OUT."
    if out_problem:
        errors.append(f"{out}: {out_problem}")
    if options.push_to_hub and get_token() is None:
        errors.append(
            f"--push_to_hub: no token for {constants.ENDPOINT}. Run `hf auth login`, or set HF_TOKEN."
        )
    check(errors)
    return options


def export_kind(folder: Path) -> Literal["checkpoint", "run", "adapter"] | None:
    """Return the kind of a directory that recipes/export.py can read, or None."""
    if (folder / "trainer.json").is_file():
        return "checkpoint"
    if folder.name.startswith("step-") and folder.is_dir():
        return "checkpoint"  # perhaps a corrupted one; the export says so
    if any((folder / "checkpoints").glob("step-*")):
        return "run"
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    return None


def _is_adapter_of_run(folder: Path) -> bool:
    is_of_run = folder.name == "model" and (folder.parent / RUN_MARKER).is_file()
    return is_of_run and (folder / "adapter_config.json").is_file()


def recorded_inputs(folder: Path) -> dict[str, str | None]:
    """Return the inputs of a run or of a checkpoint's run; none if it cannot be read (a checksum
    shows that)."""
    newest_first = sorted(folder.glob("checkpoints/step-*/trainer.json"), reverse=True)
    for file in (folder / "trainer.json", *newest_first):
        with suppress(OSError, ValueError, LookupError, TypeError):
            config = json.loads(file.read_text())["config"]
            values = {**config["model"], **config["peft"]}
            return {name: values.get(name) for name in RECORDED_INPUTS}
    return {}
