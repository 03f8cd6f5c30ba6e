"""Merge a trained adapter into the model it was trained on: a plain model that transformers, vLLM and others load.

The base is read in its original precision, also after a run with --quantization, one block of rows at a time: no GPU
and hardly any memory is needed. How a tensor is merged is in llama_ft/checkpoint/merge.py.
"""

import sys
from argparse import Namespace
from pathlib import Path

from llama_ft.config import (
    ScriptFlags,
    adapter_complaint,
    base_model_of,
    exit_with,
    model_complaint,
    model_dir_complaint,
    parse_size,
)
from llama_ft.errors import RunFailure, UserError


def read_options(argv: list[str]) -> Namespace:
    """The command line, with every mistake in it told at once."""
    flags = ScriptFlags(str(__doc__))
    flags.add_argument("--adapter", metavar="FOLDER", help="the adapter: output/<run>/model, or as peft saves one")
    flags.add_argument("--output_dir", metavar="FOLDER", help="where the merged model is written")
    flags.add_argument(
        "--base_model", metavar="NAME", help="folder or hub name of the unquantized model it was trained on; default: "
        "what adapter_config.json says"
    )  # fmt: skip
    flags.add_argument(
        "--save_dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="precision of the merged model; auto (default): the base model's own, tensor by tensor"
    )  # fmt: skip
    flags.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="largest file (default 5GB)")
    flags.add_argument("--overwrite", action="store_true", help="replace the model that output_dir already holds")
    flags.add_argument("--trust_remote_code", action="store_true", help="let the base model bring Python code")
    options = flags.read(argv)
    if mistakes := list(_mistakes(options)):
        raise UserError(*mistakes)
    return options


def _mistakes(options: Namespace) -> list[str]:
    mistakes = [f"--{name} is needed." for name in ("adapter", "output_dir") if not getattr(options, name)]
    if options.adapter:
        if complaint := adapter_complaint(options.adapter):
            mistakes.append(f"--adapter {options.adapter}: {complaint}")
        else:
            mistakes += _base_mistakes(options)
    if options.output_dir:
        inputs = {"--adapter": options.adapter, "--base_model": options.base_model}
        if complaint := model_dir_complaint(options.output_dir, options.overwrite, inputs):
            mistakes.append(f"--output_dir {options.output_dir}: {complaint}")
    try:
        parse_size(options.max_shard_size)
    except ValueError:
        mistakes.append(f"--max_shard_size {options.max_shard_size}: a size is written as 5GB or 500MB.")
    return mistakes


def _base_mistakes(options: Namespace) -> list[str]:
    """Also settle options.base_model, and options.base_place: who named it."""
    options.base_place, way_out = "--base_model", ""
    if not options.base_model:
        options.base_place = f"{options.adapter}/adapter_config.json (--base_model overrides it): base model"
        way_out = "\n--base_model says what to use instead."
        try:
            options.base_model = base_model_of(options.adapter)
        except UserError as error:
            return list(error.messages)
    complaint = model_complaint(options.base_model)
    return [f"{options.base_place} {options.base_model}: {complaint}{way_out}"] if complaint else []


if __name__ == "__main__":
    # Before the imports below, which take 10 s: --help and most mistakes are answered at once.
    try:
        OPTIONS = read_options(sys.argv[1:])
    except UserError as error:
        exit_with(error)

from llama_ft import checkpoint, models  # noqa: E402
from llama_ft.runtime import configure_console, log  # noqa: E402


def main(options: Namespace) -> None:
    """From an adapter to a model on disk."""
    folder = Path(options.output_dir).expanduser().absolute()
    checkpoint.merge_adapter(
        Path(options.adapter).expanduser(),
        models.local_folder(options.base_model, options.base_place),
        folder,
        checkpoint.save_dtype(options.save_dtype),
        parse_size(options.max_shard_size),
        options.trust_remote_code,
    )
    log.info(f"The merged model: {folder}")


if __name__ == "__main__":
    configure_console(rank=0)
    try:
        main(OPTIONS)
    except RunFailure as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except UserError as error:
        exit_with(error)
