"""From a model's name to a local folder. The hub is asked once: after that, nothing touches the network."""

from pathlib import Path

from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from llama_ft.errors import UserError
from llama_ft.models.source import BIN_FILE, BIN_INDEX_FILE, INDEX_FILE, SINGLE_FILE, weight_files
from llama_ft.runtime.console import log

NEEDED_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
PROBE_SECONDS = 10.0


def local_folder(name: str, flag: str, ask_hub: bool = True, weights: bool = True) -> Path:
    """The folder of a model or tokenizer: `name` itself where it is a folder, else the hub's files in its cache.

    Args:
        name: a local folder or a hub name (owner/model).
        flag: the setting `name` came from, for messages.
        ask_hub: False where another process of this node has just done so: the hub's cache then has it.
        weights: whether the weights are needed: safetensors, or .bin files where the hub has nothing else.

    Raises:
        UserError: no such folder or hub model, no access to a gated one, or the hub cannot be reached and its cache
            does not hold the model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    # Mistral and Meta put the same weights a second time into consolidated.safetensors or original/.
    skipped = ["consolidated*", "original/*"]
    if not ask_hub:
        return Path(snapshot_download(name, allow_patterns=NEEDED_FILES, local_files_only=True))
    try:
        offered = {file.rfilename for file in model_info(name, timeout=PROBE_SECONDS).siblings or ()}
        only_bin = not offered & {INDEX_FILE, SINGLE_FILE} and bool(offered & {BIN_INDEX_FILE, BIN_FILE})
        patterns = NEEDED_FILES + (["pytorch_model*.bin" if only_bin else "*.safetensors"] if weights else [])
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=skipped))
    except GatedRepoError as error:
        raise UserError(
            f"{flag} {name}: this model is gated.\nAsk for access at {constants.ENDPOINT}/{name}, then log in with "
            "`hf auth login` (or set HF_TOKEN)."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{flag} {name}: no folder here and no model on the hub has this name.\nA private model needs "
            "`hf auth login`; a local one, the path of its folder."
        ) from error
    except HFValidationError as error:
        raise UserError(f"{flag} {name}: no such folder, and not a possible hub name ({error}).") from error
    except (OfflineModeIsEnabled, HTTPError, OSError, LocalEntryNotFoundError) as error:
        return _from_cache(name, flag, weights, error)


def lasting_name(name: str, folder: Path) -> str:
    """What to call a model in files that outlive the run: its hub name, or its folder's absolute path."""
    return str(folder.resolve()) if name == "demo" or Path(name).expanduser().is_dir() else name


def _from_cache(name: str, flag: str, weights: bool, reason: Exception) -> Path:
    first_line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    try:
        folder = Path(snapshot_download(name, allow_patterns=NEEDED_FILES, local_files_only=True))
        if weights:
            _check_complete(folder)
    except (LocalEntryNotFoundError, FileNotFoundError) as error:
        raise UserError(
            f"{flag} {name}: no folder of this name here, and the hub could not be asked ({first_line}).\nGive the "
            f"path of a local folder, or try again when {constants.ENDPOINT} can be reached."
        ) from error
    log.info(f"{name}: the hub cannot be reached ({first_line}); using the copy downloaded earlier, {folder}")
    return folder


def _check_complete(folder: Path) -> None:
    files = weight_files(folder, INDEX_FILE, SINGLE_FILE) or weight_files(folder, BIN_INDEX_FILE, BIN_FILE)
    for file in files or [folder / SINGLE_FILE]:
        if not file.exists():
            raise FileNotFoundError(file.name)
