"""The command line of recipes/export.py, with every mistake in it told at once and before torch is imported."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, get_token

from llama_ft.config.output_dir import model_dir_complaint
from llama_ft.config.paths import adapter_complaint, base_model_of, looks_local, model_complaint
from llama_ft.config.rules import parse_size
from llama_ft.config.script_flags import ScriptFlags, whole_number
from llama_ft.config.wording import nearest_file
from llama_ft.errors import UserError

Kind = Literal["checkpoint", "run", "adapter"]
Settings = dict[str, dict[str, Any]]  # section -> field -> value
RUN_READS = ("model_name", "tokenizer_name", "from_peft_checkpoint")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_export_flags(argv: list[str], description: str) -> Namespace:
    """Returns the flags, and in `kind` what `checkpoint` is.

    Args:
        argv: the words after the script's name.
        description: what the script does, for --help.

    Raises:
        UserError: with one message for every mistake.
    """
    flags = ScriptFlags(description)
    flags.add_argument(
        "checkpoint", nargs="?", metavar="CHECKPOINT", help="a checkpoint (output/<run>/checkpoints/step-000100), a "
        "run's directory (its result: after early stopping the best checkpoint, else the newest sound one), or a saved "
        "adapter, which is merged"
    )  # fmt: skip
    flags.add_argument("out", nargs="?", metavar="OUT", help="the folder that is written")
    flags.add_argument(
        "--step", type=whole_number(1), metavar="N", help="of a run's directory: take the checkpoint of this step"
    )
    flags.add_argument("--merge", action="store_true", help="LoRA: a whole model with the adapter merged into it")
    flags.add_model_flags(
        "base_model", "tokenizer_name", "trust_remote_code", base_model="folder or hub name of the unquantized model "
        "that was tuned; default: where the run or the adapter found it"
    )  # fmt: skip
    flags.add_argument(
        "--save_dtype", "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="precision of what is written; auto (default): the base model's own, tensor by tensor; adapters as they "
        "were trained"
    )  # fmt: skip
    flags.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="largest file (default 5GB)")
    flags.add_argument("--overwrite", action="store_true", help="replace the model that OUT already holds")
    flags.add_argument(
        "--push_to_hub", metavar="OWNER/NAME", help="then upload OUT to this repository of the Hugging Face hub; the "
        "token is HF_TOKEN's or that of `hf auth login`"
    )  # fmt: skip
    flags.add_argument("--private", action="store_true", help="with --push_to_hub: a private repository")
    flags.add_argument("--adapter", metavar="FOLDER", help="another way to name a saved adapter")
    flags.add_argument("--output_dir", metavar="FOLDER", help="another way to name OUT")
    options = flags.read(argv)
    if mistakes := _mistakes(options):
        raise UserError(*mistakes)
    return options


def _mistakes(options: Namespace) -> list[str]:
    """Also settle `checkpoint`, `out`, `kind` and `base_model`."""
    mistakes = _name_both(options)
    where = "--adapter " if options.adapter else ""
    options.kind, settings = None, Settings()
    if options.checkpoint and not mistakes:
        complaint = adapter_complaint(options.adapter) if options.adapter else _checkpoint_complaint(options.checkpoint)
        if options.step and not complaint and (missing := _pick_step(options)):
            mistakes.append(f"--step {options.step}: {missing}")
        elif complaint:
            mistakes.append(f"{where}{options.checkpoint}: {complaint}")
        else:
            options.kind = export_kind(Path(options.checkpoint).expanduser())
            settings = _recorded(Path(options.checkpoint).expanduser(), options.kind)
            mistakes += _base_mistakes(options, settings)
    if options.out:
        inputs = {
            "--adapter" if options.adapter else "CHECKPOINT": options.checkpoint,
            "--base_model": options.base_model,
            **_read_by_run(settings),
        }
        if complaint := model_dir_complaint(options.out, options.overwrite, inputs):
            mistakes.append(f"{'--output_dir ' if options.output_dir else ''}{options.out}: {complaint}")
    try:
        parse_size(options.max_shard_size)
    except ValueError:
        mistakes.append(f"--max_shard_size {options.max_shard_size}: a size is written as 5GB or 500MB.")
    if options.push_to_hub and not HUB_NAME.fullmatch(options.push_to_hub):
        mistakes.append(f"--push_to_hub {options.push_to_hub}: a repository is named owner/name.")
    elif options.push_to_hub and get_token() is None:
        mistakes.append(
            f"--push_to_hub {options.push_to_hub}: no token for {constants.ENDPOINT}.\nLog in with `hf auth login`, or "
            "set HF_TOKEN."
        )
    if options.private and not options.push_to_hub:
        mistakes.append("--private: nothing is uploaded without --push_to_hub owner/name.")
    return mistakes


def _pick_step(options: Namespace) -> str | None:
    """Settle `checkpoint` to be the one of `step` in a run's directory; says why there is none."""
    run = Path(options.checkpoint).expanduser()
    if export_kind(run) != "run":
        return f"{options.checkpoint} is not the directory of a run."
    folder = run / "checkpoints" / f"step-{options.step:06d}"
    if not folder.is_dir():
        saved = sorted(path.name for path in folder.parent.glob("step-*"))
        return f"{options.checkpoint} has no checkpoint of this step. It has {', '.join(saved)}."
    options.checkpoint = str(folder)
    return None


def _name_both(options: Namespace) -> list[str]:
    """Words that stand alone are what no flag names, in order."""
    words = [word for word in (options.checkpoint, options.out) if word]
    options.checkpoint = options.adapter or (words.pop(0) if words else None)
    options.out = options.output_dir or (words.pop(0) if words else None)
    if words:
        return [f'"{word}" stands alone: a value follows its flag.' for word in words]
    needed = {"CHECKPOINT": options.checkpoint, "OUT": options.out}
    return [f"{name} is needed: export.py CHECKPOINT OUT." for name, value in needed.items() if not value]


def export_kind(folder: Path) -> Kind | None:
    """What a folder is that something can be made of; None where it is nothing of the kind."""
    if (folder / "trainer.json").is_file() or (folder.name.startswith("step-") and folder.is_dir()):
        return "checkpoint"
    if any((folder / "checkpoints").glob("step-*")):
        return "run"
    return "adapter" if (folder / "adapter_config.json").is_file() else None


def _checkpoint_complaint(name: str) -> str | None:
    folder = Path(name).expanduser()
    if not folder.exists():
        return f"no such folder.{nearest_file(folder)}"
    kind = export_kind(folder)
    if kind == "adapter":
        return adapter_complaint(name)
    if kind is None:
        if any(folder.glob("step-*")):
            return f"holds checkpoints. Name one of them, or the run: {folder.parent}."
        return "is neither a checkpoint, nor a run's directory with checkpoints, nor an adapter."
    return None


def _read_by_run(settings: Settings) -> dict[str, str]:
    """What is needed of other folders whenever something is made of the run's checkpoints."""
    held = {**settings.get("model", {}), **settings.get("peft", {})}
    given = {name: held[name] for name in RUN_READS if held.get(name)}
    return {f"CHECKPOINT's run ({name})": value for name, value in given.items() if looks_local(value)}


def _base_mistakes(options: Namespace, settings: Settings) -> list[str]:
    place, way_out, mistakes = "--base_model", "", list[str]()
    named = options.base_model
    if options.kind == "adapter":
        if named is None:
            place = f"{options.checkpoint}/adapter_config.json (--base_model overrides it): base model"
            way_out = "\n--base_model says what to use instead."
            try:
                named = options.base_model = base_model_of(options.checkpoint)
            except UserError as error:
                return list(error.messages)
        options.base_place = place
    elif settings:
        if named is None:
            place = f"{options.checkpoint}: its run's model_name (--base_model overrides it)"
            way_out = "\n--base_model says where it is now."
            named = settings["model"]["model_name"]
        if options.merge and not settings["peft"]["use_peft"]:
            mistakes.append(f"--merge: {options.checkpoint} is of full tuning; there is no adapter to merge.")
    complaint = model_complaint(named) if named else None
    return [*mistakes, *([f"{place} {named}: {complaint}{way_out}"] if complaint else [])]


def _recorded(folder: Path, kind: Kind | None) -> Settings:
    """The settings of the run, if trainer.json can be read; where it is damaged, its checksum will tell."""
    checkpoints = [folder] if kind == "checkpoint" else sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    for checkpoint in checkpoints:
        try:
            config = json.loads((checkpoint / "trainer.json").read_text())["config"]
            if {"model_name"} <= config["model"].keys() and {"use_peft"} <= config["peft"].keys():
                return dict(config)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return {}
