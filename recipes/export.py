"""Export a checkpoint as a model or an adapter, for Transformers, PEFT, vLLM and others, or for the
Hugging Face Hub.

CHECKPOINT is a checkpoint, a run's directory or a saved adapter. One process reads it block by
block, without a GPU and with little memory. The output is what a run writes to output_dir/model.
--merge merges an adapter into its base model, in the original precision, also after --quantization.
"""

import signal
import sys
from functools import partial
from pathlib import Path

from llama_ft.config import parse_size
from llama_ft.errors import RunFailure, UserError, before_imports, exit_on_error, reason
from llama_ft.export_flags import ExportFlags, read_export_flags

if __name__ == "__main__":
    with before_imports():
        OPTIONS = read_export_flags(sys.argv[1:], str(__doc__))

from finetuning import build_model  # noqa: E402
from huggingface_hub import HfApi, constants  # noqa: E402
from huggingface_hub.errors import HTTPError  # noqa: E402

from llama_ft import checkpoint, door, models  # noqa: E402
from llama_ft.export import Exporter, copy_adapter, find_valid, save_dtype  # noqa: E402
from llama_ft.runtime import configure_console, log  # noqa: E402

ATTEMPTS = 3  # to read the newest checkpoint of a run that deletes older ones


def main(options: ExportFlags) -> None:
    """Export a checkpoint to a directory that Transformers can load, and upload it if asked."""
    for attempt in range(1, ATTEMPTS + 1):
        candidates = checkpoint.complete_checkpoints(options.source) or [options.source]
        try:
            export(options)
            break
        except UserError as error:
            deleted = [folder for folder in candidates if not folder.exists()]
            if not deleted:
                raise
            what = f"{deleted[0]} was deleted while it was read, by a run with --keep_last."
            if attempt == ATTEMPTS or options.kind != "run":
                raise RunFailure(
                    f"{what}\nExport the run again, or first copy a checkpoint."
                ) from error
            log.warning(f"{what} The newest checkpoint is read instead.")
    for finish in door.functions_of("export", options):  # flags of extensions
        finish(options)
    if options.push_to_hub:
        log.info(f"Uploaded to {upload(options.out, options.push_to_hub, options.private)}")


def export(options: ExportFlags) -> None:
    """Write the model or the adapter."""
    folder, place = options.out, options.source
    write = (folder, save_dtype(options.save_dtype), parse_size(options.max_shard_size))
    finish = partial(door.finish_export, options)
    if options.kind == "adapter" and options.keeps_adapter:
        copy_adapter(place, folder, options.base_model or "", finish)
        log.info(f"Written: {folder}")
        return
    if options.kind == "adapter" and options.base_model:
        base = models.local_folder(
            options.base_model, f"{place} (--base_model overrides it): base model"
        )
        log.info(f"The adapter: {place}")
        exporter = Exporter.of_adapter(
            place, build_model, base, options.base_model, options.trust_remote_code
        )
    else:
        valid = find_valid(place)
        log.info(f"The checkpoint: {valid.folder}, after step {valid.step}")
        exporter = Exporter.prepare(
            valid,
            build_model,
            options.base_model,
            options.tokenizer_name,
            options.trust_remote_code,
            merge=options.merge,
        )
    if exporter.adapter is None or options.merge or options.kind == "adapter":
        exporter.write_model(*write, finish)
    else:
        exporter.write_adapter(*write[:2], finish)
    log.info(f"Written: {folder}")


def upload(folder: Path, repository: str, private: bool) -> str:
    """Upload a complete directory to the Hub with the token of HF_TOKEN or `hf auth login`. Return
    its URL."""
    api = HfApi()
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        if private and not api.model_info(repository).private:
            raise RunFailure(
                f"--push_to_hub {repository}: is public; nothing was uploaded. {folder} is complete."
            )
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload from llama_ft"
        )
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise RunFailure(
            f"--push_to_hub {repository}: the upload to {constants.ENDPOINT} failed ({reason(error)}).\n"
            f"{folder} is complete; `hf upload {repository} {folder}{' --private' * private}` uploads it later."
        ) from error
    return address


if __name__ == "__main__":
    configure_console(rank=0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    with exit_on_error():
        try:
            main(OPTIONS)
        except KeyboardInterrupt:
            print(f"stopped by Ctrl-C; nothing was written to {OPTIONS.out}", file=sys.stderr)
            sys.exit(130)
        except RunFailure as error:
            print(error, file=sys.stderr)
            sys.exit(1)
