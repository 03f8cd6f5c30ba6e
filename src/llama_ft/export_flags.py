"""The command line of recipes/export.py."""

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub import constants, get_token
from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.messages import nearest_file
from llama_ft.config.output_dir import deleted_input, not_writable
from llama_ft.config.paths import adapter_problem, base_model_of, looks_local, model_problem
from llama_ft.config.rules import parse_size
from llama_ft.config.run_settings import STRICT, Count
from llama_ft.config.tool_flags import check, read
from llama_ft.errors import UserError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# All that an exported model's or adapter's folder holds, and so all that --overwrite may delete there. The base model's
# Python files are not in it: they cannot be told from the user's.
MODEL_PATTERNS = (
    "config.json", "generation_config.json", "model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "*.tiktoken",
)  # fmt: skip
CARD_TAG = "\n- llama_ft\n"  # in the header of every model card that checkpoint/model_card.py writes


@dataclass(config=STRICT, kw_only=True)
class ExportFlags:
    """Flags of recipes/export.py."""

    places: list[str] = Field(default_factory=list)
    """CHECKPOINT OUT, which stand alone: a checkpoint, a run's directory or a saved adapter, which is merged; and the
    directory that is written."""

    step: Count | None = None
    """Of a run's directory: the checkpoint of this step; if not given, after early stopping the best one, else the
    newest sound one."""

    merge: bool = False
    """LoRA: write a whole model with the adapter merged into it."""

    base_model: str | None = None
    """Directory or Hub name of the unquantized model that was fine-tuned; if not given, what the run or the adapter
    names."""

    tokenizer_name: str | None = None
    """Directory or Hub name of another tokenizer."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of what is written; auto: the base model's own, tensor by tensor; adapters as they were trained."""

    max_shard_size: str = "5GB"
    """Largest file."""

    overwrite: bool = False
    """Replace the model that OUT already holds."""

    push_to_hub: str | None = None
    """OWNER/NAME: then upload OUT to this repository of the Hugging Face Hub, with the token of HF_TOKEN or
    `hf auth login`."""

    private: bool = False
    """With --push_to_hub: a private repository."""

    adapter: str | None = None
    """Another way to name a saved adapter."""

    output_dir: str | None = None
    """Another way to name OUT."""

    # No flags: settled by the others. kind is checkpoint, run or adapter; base_place names the base model in messages.
    source: ClassVar[Path]
    out: ClassVar[Path]
    kind: ClassVar[str]
    base_place: ClassVar[str]


def read_export_flags(argv: list[str], description: str) -> ExportFlags:
    """Return the flags, with `source`, `out`, `kind` and `base_place` settled.

    Raises:
        UserError: with one message for every error.
        SystemExit: 0 after --help.
    """
    options, parsed, errors = read(argv, ExportFlags, description, {"dtype": "save_dtype"})
    words = list(options.places)
    source = options.adapter or (words.pop(0) if words else "")
    out = options.output_dir or (words.pop(0) if words else "")
    if not source or not out:
        raise UserError(*errors, "Expected export.py CHECKPOINT OUT: what is read, and the directory that is written.")
    if words:
        errors.append(f'"{words[0]}" stands alone: what is read and what is written are already named.')
    settings: dict[str, Any] = {}
    folder, base_place = Path(source).expanduser(), "--base_model"
    kind = "adapter" if options.adapter else export_kind(folder) or ""
    if options.step:
        if kind != "run":
            raise UserError(*errors, f"--step {options.step}: {source} is not the directory of a run.")
        folder, kind = folder / "checkpoints" / f"step-{options.step:06d}", "checkpoint"
        if not folder.is_dir():
            saved = ", ".join(sorted(path.name for path in folder.parent.glob("step-*")))
            raise UserError(*errors, f"--step {options.step}: {source} has no checkpoint of this step. It has {saved}.")
    if kind == "adapter":
        if error := adapter_problem(source):
            errors.append(f"{'--adapter ' if options.adapter else ''}{source}: {error}")
        else:
            base_place = f"{source}/adapter_config.json (--base_model overrides it): base model"
            errors += _find_base(source, base_place, options)
            base_place = "--base_model" if "base_model" in parsed.places else base_place
    elif not kind:
        errors.append(f"{source}: {_no_checkpoint(folder)}")
    elif settings := recorded_settings(folder, kind):
        named = options.base_model or settings["model"]["model_name"]
        if error := model_problem(named):
            place = (
                "--base_model" if options.base_model else f"{source}: its run's model_name (--base_model overrides it)"
            )
            errors.append(f"{place} {named}: {error}\n--base_model says where it is now.")
        if options.merge and not settings["peft"]["use_peft"]:
            errors.append(f"--merge: {source} is full fine-tuning; there is no adapter to merge.")
    held = {**settings.get("model", {}), **settings.get("peft", {})}
    reads = {name: held.get(name) for name in ("model_name", "tokenizer_name", "from_peft_checkpoint")}
    inputs = {"CHECKPOINT": source, "--base_model": options.base_model}
    inputs |= {f"CHECKPOINT's run ({name})": value for name, value in reads.items() if value and looks_local(value)}
    if error := model_dir_problem(out, options.overwrite, inputs):
        errors.append(f"{out}: {error}")
    try:
        parse_size(options.max_shard_size)
    except ValueError:
        errors.append(f"--max_shard_size {options.max_shard_size}: a size is written as 5GB or 500MB.")
    if options.push_to_hub and not HUB_NAME.fullmatch(options.push_to_hub):
        errors.append(f"--push_to_hub {options.push_to_hub}: a repository is named owner/name.")
    elif options.push_to_hub and get_token() is None:
        errors.append(
            f"--push_to_hub: no token for {constants.ENDPOINT}. Log in with `hf auth login`, or set HF_TOKEN."
        )
    if options.private and not options.push_to_hub:
        errors.append("--private: nothing is uploaded without --push_to_hub owner/name.")
    check(errors)
    options.source, options.out = folder, Path(out).expanduser().absolute()
    options.kind, options.base_place = kind, base_place
    return options


def _find_base(adapter: str, place: str, options: ExportFlags) -> list[str]:
    """Settle `base_model` to be what the adapter names; return the errors."""
    if options.base_model is None:
        try:
            options.base_model = base_model_of(adapter)
        except UserError as failure:
            return list(failure.messages)
        error = model_problem(options.base_model)
        return [f"{place} {options.base_model}: {error}\n--base_model says what to use instead."] if error else []
    error = model_problem(options.base_model)
    return [f"--base_model {options.base_model}: {error}"] if error else []


def _no_checkpoint(folder: Path) -> str:
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    if any(folder.glob("step-*")):
        return f"holds checkpoints. Name one of them, or the run: {folder.parent}."
    return "is neither a checkpoint, nor a run's directory with checkpoints, nor an adapter."


def model_dir_problem(directory: str, overwrite: bool, inputs: Mapping[str, str | None]) -> str | None:
    """Say why a model cannot be written into directory, a folder of its own. See `output_dir_problem`."""
    path = Path(directory).expanduser()
    obstacle = not_writable(path)
    if obstacle or not path.exists() or not any(path.iterdir()):
        return obstacle
    files = [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if not file.is_dir()]
    if others := [name for name in files if not any(fnmatch(name, known) for known in MODEL_PATTERNS)]:
        return f"holds more than a model ({', '.join(others[:5])}). Choose another output_dir."
    card = path / "README.md"
    if not (card.is_file() and CARD_TAG in card.read_text(errors="replace")):
        return "holds a model that llama_ft did not write (no README.md tagged llama_ft). Choose another output_dir."
    if not overwrite:
        return "already holds a model. Choose another output_dir, or replace that model with --overwrite."
    return deleted_input([path], inputs)


def export_kind(folder: Path) -> Literal["checkpoint", "run", "adapter"] | None:
    """Return what a directory is that recipes/export.py can read, or None."""
    if (folder / "trainer.json").is_file() or (folder.name.startswith("step-") and folder.is_dir()):
        return "checkpoint"
    if any((folder / "checkpoints").glob("step-*")):
        return "run"
    return "adapter" if (folder / "adapter_config.json").is_file() else None


def recorded_settings(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Return the settings that the newest readable trainer.json has; a corrupted one fails by its checksum later."""
    checkpoints = [folder] if kind == "checkpoint" else sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    for checkpoint in checkpoints:
        try:
            config = json.loads((checkpoint / "trainer.json").read_text())["config"]
            if {"model_name"} <= config["model"].keys() and {"use_peft"} <= config["peft"].keys():
                return dict(config)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return {}
