"""Hand an adapter or a model over to a server: judge it, change what the server needs otherwise, and
print the command that serves it."""

import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from llama_ft import data, models
from llama_ft.config.paths import base_model_of
from llama_ft.errors import UserError
from llama_ft.export_flags import recorded_inputs
from llama_ft.extensions.serving.adapter_files import (
    BaseFiles,
    SavedAdapter,
    find_misfit,
    read_adapter,
    read_base,
    read_json,
    read_template,
)
from llama_ft.extensions.serving.gguf_files import write as gguf_write
from llama_ft.extensions.serving.gguf_files.modelfile import MODELFILE, write_modelfile
from llama_ft.extensions.serving.judgment import EXPERTS, AdapterVerdict
from llama_ft.extensions.serving.rules import RequestedServer, read_target, table, vllm_versions
from llama_ft.extensions.serving.sglang import check_sglang
from llama_ft.extensions.serving.vllm import check_vllm
from llama_ft.models.adapters.adapter_config import ADAPTER_CONFIG
from llama_ft.models.adapters.names import ADAPTER_WEIGHTS, PEFT_PREFIX

TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
GGUF_SERVERS = ("llama.cpp", "ollama")


@dataclass(frozen=True)
class HandOver:
    """What is handed over, and to whom.

    Attributes:
        target: `--for`.
        source: the run, checkpoint or adapter, as the user named it.
        out: the directory to write.
        base_name: Hub name or directory of the base model.
        base: its directory.
        base_flag: `--base_model` and its value, if the source does not name this base model.
    """

    target: RequestedServer
    source: str
    out: Path
    base_name: str
    base: Path
    base_flag: tuple[str, ...] = ()

    def refusal(self, verdict: AdapterVerdict, base: BaseFiles) -> UserError:
        """Return the error about an adapter that the server cannot serve."""
        flags = ["--for", self.target.server, "--merge", "--save_dtype", base.dtype]
        merge = ["llama-ft", "export", self.source, str(self.out), *flags, *self.base_flag]
        return UserError(verdict.refusal(shlex.join(merge)))

    def finish_adapter(self, folder: Path) -> str:
        """Change a written adapter into what the server needs. Return lines for the log.

        Args:
            folder: of the adapter, before it is moved to `out`.

        Raises:
            UserError: the server would ignore or reject it.
        """
        base = read_base(self.base, self.base_name)
        adapter = read_adapter(folder, self.source)
        misfit = find_misfit(adapter, base)
        if misfit:
            raise UserError(
                f"{self.source}: is an adapter of another base model than {base.name} ({misfit}). "
                "--base_model names the right one."
            )
        if self.target.server in GGUF_SERVERS:
            return self._finish_gguf_adapter(folder, adapter, base)
        verdicts = judge_adapter(self.target, adapter, base)
        if not verdicts:
            return load_line(self.out)
        newest = verdicts[0]
        if newest.problems:
            raise self.refusal(newest, base)
        rename_layers(folder, adapter, newest)
        lines = [f"Written for {titles(verdicts)}:\n{serve_line(newest, folder, base, self.out)}"]
        if newest.renames:
            lines.append(f"{len(newest.renames)} layers have the names of the server's.")
        older = [verdict for verdict in verdicts[1:] if verdict.problems]
        lines += [f"Not for {verdict.title}: {verdict.problems[0].what}" for verdict in older]
        lines += newest.notes
        return "\n".join(lines)

    def _finish_gguf_adapter(self, folder: Path, adapter: SavedAdapter, base: BaseFiles) -> str:
        model, verdict = gguf_write.for_adapter(self.base, adapter)
        if verdict.problems:
            raise self.refusal(verdict, base)
        gguf_write.write_adapter(folder, model, adapter)
        file = shlex.quote(str(self.out / gguf_write.ADAPTER_FILE))
        if self.target.server == "ollama":
            lines = [f"FROM {self.base.resolve()}", f"ADAPTER ./{gguf_write.ADAPTER_FILE}"]
            write_modelfile(folder, lines)
            return self._ollama_line()
        of_base = f"python convert_hf_to_gguf.py {shlex.quote(str(self.base))} --outfile base.gguf"
        serve = f"llama-server -m base.gguf --lora {file} --jinja"
        if (folder / TEMPLATE).is_file():
            serve += f" --chat-template-file {shlex.quote(str(self.out / TEMPLATE))}"
        return f"The base model, by a script of llama.cpp: {of_base}\n{serve}"

    def _finish_gguf_model(self, folder: Path) -> str:
        if self.target.server == "ollama":
            write_modelfile(folder, [f"FROM ./{gguf_write.MODEL_FILE}"])
        gguf_write.write_model(folder)
        if self.target.server == "ollama":
            return self._ollama_line()
        file = shlex.quote(str(self.out / gguf_write.MODEL_FILE))
        return f"llama-server -m {file} --jinja"

    def _ollama_line(self) -> str:
        name = re.sub(r"[^\w.-]+", "-", self.out.name, flags=re.ASCII).strip("-.") or "tuned"
        file = shlex.quote(str(self.out / MODELFILE))
        return f"ollama create {name} -f {file} && ollama run {name}"

    def finish_model(self, folder: Path) -> str:
        """Check that the server has a class for a written model. Return lines for the log."""
        server = self.target.server
        if server in GGUF_SERVERS:
            return self._finish_gguf_model(folder)
        name = shlex.quote(str(self.out))
        architecture = str((read_json(folder / "config.json").get("architectures") or ["?"])[0])
        if server == "vllm":
            version = vllm_versions(self.target.version)[0]
            if architecture not in version.architectures:
                raise UserError(f"vLLM {version.name} has no class for {architecture}.")
            return f"vllm serve {name} --served-model-name {shlex.quote(self.out.name)}"
        if server == "sglang":
            known = table()["sglang"]
            version_name = self.target.version or max(known)
            if architecture not in known[version_name]["architectures"]:
                raise UserError(f"SGLang {version_name} has no class for {architecture}.")
            return f"python -m sglang.launch_server --model-path {name}"
        return f'AutoModelForCausalLM.from_pretrained("{self.out}") loads it.'


def judge_adapter(
    target: RequestedServer, adapter: SavedAdapter, base: BaseFiles
) -> list[AdapterVerdict]:
    """Return the verdicts of the versions of a server, the newest one first; [] for Transformers,
    which loads every adapter with PEFT."""
    if target.server == "vllm":
        return [check_vllm(version, adapter, base) for version in vllm_versions(target.version)]
    if target.server == "sglang":
        return [check_sglang(target.version, adapter, base)]
    return []


def titles(verdicts: list[AdapterVerdict]) -> str:
    """Return the versions that serve an adapter, and how that is known: vLLM (0.32 tried, 0.33 by
    source)."""
    fitting = [verdict.title.split(" ") for verdict in verdicts if not verdict.problems]
    known = [
        f"{version} {'tried' if version in table()['tried'] else 'by source'}"
        for _, version in reversed(fitting)
    ]
    return f"{fitting[0][0]} ({', '.join(known)})"


def rename_layers(folder: Path, adapter: SavedAdapter, verdict: AdapterVerdict) -> None:
    """Give the layers of a saved adapter the server's names and settings."""
    changed = {**verdict.settings, **_renamed_patterns(adapter, verdict.renames)}
    if verdict.renames:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as stored:
            tensors = {
                _renamed(name, verdict.renames): stored.get_tensor(name) for name in stored.keys()
            }
            metadata = stored.metadata()
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata)
    if changed:
        text = json.dumps({**adapter.settings, **changed}, indent=2)
        (folder / ADAPTER_CONFIG).write_text(text + "\n")


def _renamed_patterns(adapter: SavedAdapter, renames: dict[str, str]) -> dict[str, Any]:
    """Return the patterns of ranks and alphas, with the values of renamed layers by their new
    names: a server matches patterns with the names in the file."""
    changed = dict[str, Any]()
    for single, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        pattern = adapter.settings.get(name)
        if pattern and renames:
            layers = {old: new for old, new in renames.items() if EXPERTS not in old}
            renamed = {new: adapter.setting_of(old, single, name) for old, new in layers.items()}
            changed[name] = {**renamed, **pattern}
    return changed


def _renamed(name: str, renames: dict[str, str]) -> str:
    module, separator, part = name.removeprefix(PEFT_PREFIX).partition(".lora_")
    new = renames.get(module, module)
    return f"{PEFT_PREFIX}{new}{separator}{part}"


def serve_line(verdict: AdapterVerdict, folder: Path, base: BaseFiles, out: Path) -> str:
    """Return the command that serves an adapter.

    Args:
        verdict: without problems.
        folder: of the adapter.
        base: its base model.
        out: where the adapter will be.
    """
    name = out.parent.name if out.name == "model" else out.name
    if name == base.name:  # a server would answer as the base model
        name += "-adapter"
    place = str(out)
    if verdict.title.startswith("SGLang"):
        command = [
            "python",
            "-m",
            "sglang.launch_server",
            "--model-path",
            base.name,
            *verdict.flags,
        ]
        command += ["--lora-paths", f"{name}={place}"]
    else:
        module = f"{name}={place}"
        settings: dict[str, Any] = {"name": name, "path": place}
        if verdict.is_3d:
            settings["is_3d_lora_weight"] = True
        if verdict.is_3d or "," in module or "=" in name:  # vLLM splits NAME=PATH there
            module = json.dumps(settings)
        command = ["vllm", "serve", base.name, "--enable-lora", *verdict.flags]
        command += ["--lora-modules", module]
    template = read_template(folder)
    if template and template != base.template and (folder / TEMPLATE).is_file():
        command += ["--chat-template", str(out / TEMPLATE)]
    stops = read_json(folder / GENERATION_CONFIG).get("eos_token_id")
    if stops and stops != base.stops and command[0] == "vllm":
        command += ["--generation-config", str(out)]
    return shlex.join(command)


def load_line(out: Path) -> str:
    """Return how Transformers loads an adapter."""
    return f'PeftModel.from_pretrained(base, "{out}") loads it.'


def adapter_line(folder: Path, base_name: str, base: Path) -> str:
    """Return a line about an adapter at the end of its run: how vLLM serves it, or what it would
    ignore and what to do.

    Args:
        folder: of the adapter, RUN/model.
        base_name: Hub name or directory of the base model.
        base: its directory.
    """
    files = read_base(base, base_name)
    verdicts = judge_adapter(RequestedServer("vllm", None), read_adapter(folder), files)
    newest = verdicts[0]
    export = f"llama-ft export {shlex.quote(str(folder.parent))} OUT --for vllm"
    if newest.problems:
        problems = " ".join(problem.what for problem in newest.problems)
        instead = f"{export} --merge --save_dtype {files.dtype}"
        if not newest.can_be_merged:
            instead = "serve it with Transformers and PEFT"
        return f"{newest.title} cannot serve this adapter: {problems} Instead: {instead}"
    if any(verdict.renames for verdict in verdicts):
        return f"vLLM would ignore layers of this adapter by their names. Instead: {export}"
    command = serve_line(newest, folder, files, folder)
    return f"vLLM can serve this adapter ({_known(verdicts)}): {command}"


def _known(verdicts: list[AdapterVerdict]) -> str:
    return titles(verdicts).partition("(")[2].rstrip(")")


def finish_export(options: Any, written: Path) -> str:
    """Change what recipes/export.py has written into what the server of --for needs.

    Args:
        options: the flags of recipes/export.py.
        written: the directory that will become OUT.

    Returns:
        Lines for the log: the command that serves it.

    Raises:
        UserError: the server would ignore or reject it.
    """
    target = read_target(options.for_)
    source = str(options.source)
    is_adapter = (written / ADAPTER_CONFIG).is_file()
    base_name = base_of(options) if is_adapter else ""
    base = base_folder(base_name, source) if is_adapter else written
    if base_name == "demo":  # no server knows it
        base_name = str(base)
    hand_over = HandOver(target, source, options.out, base_name, base, _base_flag(options))
    lines = hand_over.finish_adapter(written) if is_adapter else hand_over.finish_model(written)
    return "\n".join([line for line in (target.note, lines) if line])


def base_of(options: Any) -> str:
    """Return the base model of what is exported: its Hub name or directory."""
    return options.base_model or _own_base(options)


def _own_base(options: Any) -> str:
    """Return the base model that a run or adapter names."""
    recorded = recorded_inputs(options.source).get("model_name")
    return recorded or base_model_of(str(options.source))


def _base_flag(options: Any) -> tuple[str, ...]:
    """Return --base_model and its value, if a command about the source needs it."""
    own = ""
    with suppress(UserError):
        own = _own_base(options)
    named = options.base_model
    return ("--base_model", named) if named and named != own else ()


def base_folder(name: str, source: str) -> Path:
    """Return the directory of a base model."""
    if name == "demo":
        return data.build_demo(data.cache_dir()).model_dir
    place = f"{source} (--base_model overrides it): base model"
    return models.local_folder(name, place, weights=False)
