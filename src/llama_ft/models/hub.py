"""From a model's name to a local folder. The hub is asked once: after that, nothing touches the network."""

from pathlib import Path

from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, LocalEntryNotFoundError

from llama_ft.config.paths import TO_SAFETENSORS
from llama_ft.errors import UserError, reason
from llama_ft.runtime.console import log

NEEDED_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
DUPLICATES = ["consolidated*", "original/*"]  # where Mistral and Meta put the same weights a second time


def local_folder(name: str, flag: str, ask_hub: bool = True, weights: bool = True) -> Path:
    """The folder of a model or tokenizer: `name` itself if it is a folder, else the hub's files in its cache. A
    UserError if there is none, or no safetensors in it, or no access to it.

    Args:
        name: a local folder or a hub name (owner/model).
        flag: the setting `name` came from, for messages.
        ask_hub: False if another process of this node has just done so: the hub's cache then has it.
        weights: whether the weights are needed, which are safetensors.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    if not ask_hub:
        return Path(snapshot_download(name, allow_patterns=NEEDED_FILES, local_files_only=True))
    try:
        files = model_info(name, timeout=10).siblings or ()
        if weights and not any(file.rfilename.endswith(".safetensors") for file in files):
            raise UserError(f"{flag} {name}: the hub has no safetensors of it. {TO_SAFETENSORS}")
        patterns = NEEDED_FILES + (["*.safetensors"] if weights else [])
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=DUPLICATES))
    except (HFValidationError, HTTPError, OSError) as error:
        try:
            downloaded = Path(snapshot_download(name, allow_patterns=NEEDED_FILES, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            way_out = "Give the path of a local folder, or owner/model"
            if isinstance(error, GatedRepoError):
                way_out = f"Ask for access at {constants.ENDPOINT}/{name}"
            raise UserError(
                f"{flag} {name}: no such folder, and {constants.ENDPOINT} does not give it ({reason(error)}).\n"
                f"{way_out}; `hf auth login` logs in (or set HF_TOKEN)."
            ) from error
    log.info(f"{name}: the hub cannot be reached; using the copy downloaded earlier, {downloaded}")
    return downloaded


def portable_name(name: str, folder: Path) -> str:
    """What to call a model in files that outlive the run: its hub name, or its folder's absolute path."""
    return str(folder.resolve()) if name == "demo" or Path(name).expanduser().is_dir() else name
