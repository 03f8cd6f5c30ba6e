"""Load adapters into a running vLLM, and unload them.

Source: vllm/entrypoints/serve/lora/api_router.py. The answers of both requests are plain text.
"""

from pathlib import Path

from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.servers import version_of
from llama_ft.inference.server import Rejected, Server, served_models
from llama_ft.runtime import log

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
SECONDS_TO_UNLOAD = 30.0
HOW_TO_START = "Start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."


class LoraServer:
    """A server that loads adapters by name.

    Args:
        url: its address.
        timeout_seconds: longest time of a request.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self._server = Server(url, timeout_seconds)
        # the end of a run does not wait for a server that hangs
        self._unloading = Server(url, min(timeout_seconds, SECONDS_TO_UNLOAD))
        self.url = self._server.url

    def context(self) -> int | None:
        """Return the positions of the server's model; None if it does not tell. Raises UserError."""
        entries = served_models(self._server).values()
        limits = [entry.get("max_model_len") for entry in entries]
        return min((limit for limit in limits if isinstance(limit, int)), default=None)

    def version(self) -> str:
        """Return the version of the server's software; "" if it does not tell."""
        return version_of(self._server)

    def has(self, name: str) -> bool:
        """Return whether the server has an adapter. Raises UserError if it does not answer."""
        return name in served_models(self._server)

    def load(self, name: str, folder: Path) -> None:
        """Load the adapter of a directory, unless the server has one of this name.

        Raises:
            UserError: it cannot.
        """
        if self.has(name):
            return
        try:
            self._server.send(LOAD, {"lora_name": name, "lora_path": str(folder)})
        except Rejected as error:
            raise UserError(f"--server {self.url}: {_reason(error, folder)}") from error
        if not self.has(name):  # a gateway, which accepts any request
            raise UserError(
                f"--server {self.url}: does not list {name} after {LOAD}. {HOW_TO_START}"
            )

    def unload(self, name: str) -> None:
        """Unload an adapter. It is not an error if the server cannot: names are never used again."""
        try:
            self._unloading.send(UNLOAD, {"lora_name": name})
        except (Rejected, UserError) as error:
            log.debug(f"--server {self.url}: has not unloaded {name} ({error})")


def _reason(error: Rejected, folder: Path) -> str:
    """Return why a server has not loaded an adapter, and what to do."""
    message = str(error)
    if error.status == 404 and folder.name in message:
        return (
            f"does not find {folder} ({message}). It must see this directory under the same path."
        )
    if error.status in (404, 405, 501):
        return f"has no {LOAD} ({message}). {HOW_TO_START}"
    return f"rejects the adapter in {folder} (HTTP {error.status}: {message})."
