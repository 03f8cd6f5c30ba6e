"""Make a plain model, or a plain adapter, out of a checkpoint: for transformers, peft, vLLM and others, or the hub.

CHECKPOINT is a checkpoint, a run's directory or a saved adapter. It is read on one process, a block of rows at a time:
no GPU and hardly any memory is needed. What comes out is what a run leaves in output_dir/model; --merge merges an
adapter into the model it was trained beside, in its original precision, also after --quantization.
"""

import gc
import signal
import sys
from argparse import Namespace
from pathlib import Path

from llama_ft.config import exit_with, parse_size
from llama_ft.config.export_flags import read_export_flags
from llama_ft.errors import RunFailure, UserError

if __name__ == "__main__":
    # Before the imports below, which take 6 s: --help and most mistakes are answered at once.
    try:
        OPTIONS = read_export_flags(sys.argv[1:], str(__doc__))
    except UserError as error:
        exit_with(error)
    gc.disable()  # see finetuning.py

from llama_ft import checkpoint, models  # noqa: E402
from llama_ft.runtime import configure_console, log  # noqa: E402


def main(options: Namespace) -> None:
    """From a checkpoint to a folder that anyone can load, and to the hub."""
    folder = Path(options.out).expanduser().absolute()
    save_dtype, max_shard_bytes = checkpoint.save_dtype(options.save_dtype), parse_size(options.max_shard_size)
    place = Path(options.checkpoint).expanduser()
    if options.kind == "adapter":
        base = models.local_folder(options.base_model, options.base_place)
        log.info(f"The adapter: {place}")
        checkpoint.merge_adapter(
            place, base, folder, save_dtype, max_shard_bytes, options.trust_remote_code, options.base_model
        )
        what = "merged model"
    else:
        what = export_checkpoint(place, folder, options)
    log.info(f"The {what}: {folder}")
    if options.push_to_hub:
        log.info(f"Uploaded to {checkpoint.upload(folder, options.push_to_hub, options.private)}")


def export_checkpoint(place: Path, folder: Path, options: Namespace) -> str:
    """Read a checkpoint and its base model, and write what was asked for; returns what that is."""
    save_dtype, max_shard_bytes = checkpoint.save_dtype(options.save_dtype), parse_size(options.max_shard_size)
    sound = checkpoint.find_sound(place)
    log.info(f"The checkpoint: {sound.folder}, after step {sound.step}")
    exporter = checkpoint.Exporter.prepare(
        sound, options.base_model, options.tokenizer_name, options.trust_remote_code, merge=options.merge
    )
    if exporter.adapter is None:
        exporter.write_model(folder, save_dtype, max_shard_bytes)
        return "tuned model"
    if options.merge:
        exporter.write_merged(folder, save_dtype, max_shard_bytes)
        return "merged model"
    exporter.write_adapter(folder, save_dtype)
    return "tuned adapter"


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    configure_console(rank=0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is cleared away
    try:
        main(OPTIONS)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C; nothing was written to {OPTIONS.out}", file=sys.stderr)
        sys.exit(130)
    except RunFailure as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except UserError as error:
        exit_with(error)
