"""Uploading a finished folder to the Hugging Face hub. The token is the environment's, HF_TOKEN or
what `hf auth login` stored, and is never shown."""

from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError

from llama_ft.errors import RunFailure


def upload(folder: Path, repository: str, private: bool) -> str:
    """Upload all files of `folder` in one commit or a few, making the repository if need be.

    Args:
        folder: complete; it stays as it is.
        repository: owner/name.
        private: whether the repository must be private.

    Returns:
        The repository's address.

    Raises:
        RunFailure: the hub refuses or cannot be reached, or the repository is public and must not be.
    """
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise RunFailure(
                f"--push_to_hub {repository}: this repository exists and is public; nothing was uploaded.\n"
                f"{folder} is complete. Make the repository private, or choose another name."
            )
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload from llama_ft")
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunFailure(
            f"--push_to_hub {repository}: the upload to {constants.ENDPOINT} failed ({reason}).\n{folder} is complete; "
            f"`hf upload {repository} {folder}{' --private' if private else ''}` uploads it later."
        ) from error
    return str(address)
