"""Rules of inference servers about LoRA adapters, by version. benchmarks/serving/server_rules.py has read
them from the servers' source into rules.json."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from llama_ft.errors import UserError

Server = Literal["vllm", "sglang", "llama.cpp", "ollama", "transformers"]
SERVERS: tuple[Server, ...] = ("vllm", "sglang", "llama.cpp", "ollama", "transformers")
TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "ollama": "Ollama",
    "transformers": "Transformers",
}
TABLE = Path(__file__).with_name("rules.json")
# in the order in which vLLM applies them
RENAMES = ("regex", "substr", "prefix", "suffix")


@dataclass(frozen=True)
class RequestedServer:
    """What `--for` names."""

    server: Server
    version: str | None  # None: the newest one that the table has
    note: str = ""  # for the log, about a version that the table does not have


@dataclass(frozen=True)
class VllmVersion:
    """The rules of a version of vLLM.

    Attributes:
        name: such as 0.33.
        is_tried: whether adapters were served by it; else its source was read.
        ranks: the allowed values of --max-lora-rank, ascending.
        finds_text_names: whether a multimodal model takes an adapter of its text part alone.
        architectures: name in config.json -> its rules; None if it has no LoRA there.
    """

    name: str
    is_tried: bool
    ranks: tuple[int, ...]
    finds_text_names: bool
    architectures: dict[str, dict[str, Any] | None]


@cache
def table() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(TABLE.read_text())
    return read


def read_target(text: str) -> RequestedServer:
    """Return the server and version of `--for`, such as vllm or vllm:0.32.

    Raises:
        UserError: the server is not known.
    """
    name, _, version_name = text.partition(":")
    server = next((known for known in SERVERS if known == name.lower()), None)
    if server is None:
        raise UserError(f"--for {text}: expected one of {', '.join(SERVERS)}.")
    version = version_name.removeprefix("v") or None
    versions = known_versions(server)
    if version is None:
        return RequestedServer(server, None)
    short = ".".join(version.split(".")[:2]) if server == "vllm" else version
    if short in versions:
        return RequestedServer(server, short)
    if not versions:
        return RequestedServer(server, None, f"--for {text}: its versions are not told apart.")
    newest = versions[-1]
    return RequestedServer(
        server,
        newest,
        f"--for {text}: the rules of {TITLES[server]} {version} are not known. "
        f"Those of {newest} are used; known are {', '.join(versions)}.",
    )


def known_versions(server: str) -> list[str]:
    """Return the versions in the table, the newest one last."""
    versions = table().get(server, {})
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def vllm_versions(version_name: str | None) -> list[VllmVersion]:
    """Return the rules of one version of vLLM, or of all that are known, the newest one first."""
    names = known_versions("vllm")
    newest = table()["vllm"][names[-1]]["architectures"]
    versions = []
    for name in reversed(names):
        rules = table()["vllm"][name]
        architectures = {**newest, **rules["architectures"]}
        for unknown in rules["unknown"]:
            architectures.pop(unknown, None)
        versions.append(
            VllmVersion(
                name,
                name in table()["tried"],
                tuple(rules["ranks"]),
                rules["finds_text_names"],
                architectures,
            )
        )
    return [version for version in versions if version_name in (None, version.name)]


def renamed(rules: dict[str, Any], name: str) -> str:
    """Return the name that vLLM gives to a tensor of a checkpoint or adapter."""
    for kind in RENAMES:
        for old, new in rules.get(kind, {}).items():
            if kind == "regex":
                name = re.sub(old, new, name)
            elif kind == "substr":
                name = name.replace(old, new, 1)
            elif kind == "prefix" and name.startswith(old):
                name = new + name.removeprefix(old)
            elif kind == "suffix" and name.endswith(old):
                name = name.removesuffix(old) + new
    return name
