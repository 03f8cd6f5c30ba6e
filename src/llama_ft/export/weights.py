"""Write the final model or adapter in Hugging Face format: safetensors files for Transformers and
PEFT, block by block. The rows come from the ranks at the end of a run, or from a checkpoint."""

import copy
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from torch import nn
from transformers import PreTrainedTokenizerBase

from llama_ft.checkpoint.safetensors_file import Headers, SafetensorsFile
from llama_ft.config import CheckpointConfig, parse_size
from llama_ft.config.attempts import Attempts, value_over_time
from llama_ft.config.paths import (
    COPIED_FILES,
    MODEL_PATTERNS,
    PROBES_FILE,
    PROMPT_FORMAT,
    looks_local,
    recorded_prompt_format,
)
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.errors import RunFailure, plural
from llama_ft.export.export_settings import matches, write_adapter_settings, write_model_settings
from llama_ft.masking import mask_secrets
from llama_ft.models import BuiltModel
from llama_ft.models.adapters.names import ADAPTER_WEIGHTS, index_names
from llama_ft.models.base.shards import ShardGroup
from llama_ft.models.base.source import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    WeightSource,
    blocks,
    listed,
)
from llama_ft.models.built import Adapter
from llama_ft.models.weights.conversion import SavedTensors, open_model_weights, saved_layout
from llama_ft.models.weights.load_weights import account_for
from llama_ft.runtime import Ranks, log

# Settings that the model card shows.
SHOWN = ("num_epochs", "lr", "optimizer", "precision", "context_length", "seed")
CARD_SETTINGS_OF_LORA = (
    "peft_method",
    "r",
    "lora_alpha",
    "target_modules",
    "use_dora",
    "use_rslora",
    "mode",
)
METHOD_NAMES = {"lora": "LoRA", "loha": "LoHa"}  # of peft_method, for the model card
PLACE = '"path/to/this/folder"'
# blocks of rows of a tensor, in order, on the host
Rows = Callable[[str, torch.dtype], Iterator[torch.Tensor]]
Write = Callable[[Path], None]
Finish = Callable[[Path], None]  # changes what is written before it replaces the target directory


def leave_as_written(_written: Path) -> None:
    """Change nothing."""


def save_dtype(name: Literal["auto", "float32", "bfloat16", "float16"]) -> torch.dtype | None:
    """Return the dtype of `--save_dtype`; None for auto."""
    return None if name == "auto" else getattr(torch, name)


class SavedWeights:
    """Weights to write, and where their values come from.

    Args:
        tensors: parameters and buffers by name; only their shapes and dtypes are used.
        rows: returns the blocks of rows of a tensor.
        save_dtype: of all floating tensors; None: as stored.
        stored: name -> dtype, if it differs from the tensor's own.
        groups: tensors to write together, in order, with their layout; None: each tensor as it is.
        untouched: further tensors to write at the end, unchanged for any save_dtype.
    """

    def __init__(
        self,
        tensors: Headers,
        rows: Rows,
        save_dtype: torch.dtype | None,
        stored: Mapping[str, torch.dtype] = {},
        groups: list[SavedTensors] | None = None,
        untouched: Mapping[str, StoredTensor] = {},
    ) -> None:
        self.tensors = tensors
        self.rows = rows
        self.dtypes = dict[str, torch.dtype]()
        for name, tensor in tensors.items():
            is_cast = save_dtype is not None and tensor.dtype.is_floating_point
            dtype = save_dtype if is_cast else stored.get(name, tensor.dtype)
            assert dtype is not None
            self.dtypes[name] = dtype
        if groups:
            self.groups = groups
        else:
            self.groups = []
            for name, tensor in tensors.items():
                self.groups.append(SavedTensors([name], {name: tuple(tensor.shape)}))
        self.ignored = [name for name, header in untouched.items() if header.is_ignored]
        for name, header in untouched.items():
            self.dtypes[name] = header.dtype
            self.groups.append(SavedTensors([name], {name: header.shape}))
        self.headers = list[dict[str, StoredTensor]]()
        for group in self.groups:
            # A group is converted as one, so it has one dtype.
            dtype = self.dtypes[group.parameters[0]]
            headers = dict[str, StoredTensor]()
            for name, shape in group.tensors.items():
                headers[name] = StoredTensor(Path(), shape, dtype)
            self.headers.append(headers)

    def main_dtype(self) -> torch.dtype:
        """The dtype of the largest tensor, for config.json: Transformers loads the model in this
        dtype."""

        def size(name: str) -> int:
            return math.prod(self.tensors[name].shape)

        return self.dtypes[max(self.tensors, key=size)]

    def write(self, folder: Path, max_shard_bytes: int) -> None:
        """Write model*.safetensors, and the index if there are several files. No file is larger
        than max_shard_bytes, unless a single group is."""
        if self.ignored:
            log.info(
                f"Copied unchanged: {plural(len(self.ignored), 'tensor')} that Transformers ignores "
                f"at loading ({listed(self.ignored, 1)})"
            )
        files = [list[int]()]
        filled = 0
        total = 0
        for number, headers in enumerate(self.headers):
            size = sum(header.nbytes for header in headers.values())
            if files[-1] and filled + size > max_shard_bytes:
                files.append([])
                filled = 0
            files[-1].append(number)
            filled = filled + size
            total = total + size
        names = [SINGLE_FILE]
        if len(files) > 1:
            names = [
                f"model-{number:05d}-of-{len(files):05d}.safetensors"
                for number in range(1, len(files) + 1)
            ]
        named = dict(zip(names, files, strict=True))
        for name, members in named.items():
            self.write_file(folder / name, members)
        if len(files) > 1:
            weight_map = dict[str, str]()
            for name, members in named.items():
                for member in members:
                    weight_map |= dict.fromkeys(self.headers[member], name)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write_file(self, path: Path, members: Iterable[int]) -> None:
        """Write the groups with these indices into one file."""
        headers = dict[str, StoredTensor]()
        for member in members:
            headers |= self.headers[member]
        with SafetensorsFile(path, headers) as file:
            for member in members:
                for rows in self._converted(self.groups[member]):
                    file.append(rows)

    def _converted(self, group: SavedTensors) -> Iterator[torch.Tensor]:
        """Yield the group's converted tensors in blocks, as they arrive. Some conversions need
        whole tensors."""
        first = group.parameters[0]
        dtype = self.dtypes[first]
        if group.converted is None:
            yield from self.rows(first, dtype)
        elif group.by_row:
            for several in self.rows(first, dtype):
                for row in several.split(1):
                    yield from group.convert({first: row})
        else:
            whole = {
                name: torch.empty(self.tensors[name].shape, dtype=dtype)
                for name in group.parameters
            }
            for name, tensor in whole.items():  # in memory only once
                start = 0
                for several in self.rows(name, dtype):
                    tensor[start : start + len(several)] = several
                    start += len(several)
            yield from group.convert(whole)


def export_model(
    built: BuiltModel,
    folder: Path,
    settings: CheckpointConfig,
    tokenizer: PreTrainedTokenizerBase,
    write_card: Write,
    ranks: Ranks,
) -> None:
    """Write a fully fine-tuned model. All ranks call it; rank 0 writes.

    Args:
        built: the sharded model. Frozen weights, buffers and other files come from the directory of
            its base model.
        folder: target directory, replaced in one step when all files are written.
        settings: save_dtype of all floating tensors (auto: as in the base model), and
            max_shard_size, the maximum size of a file.
        tokenizer: saved with the model, including its chat template.
        write_card: called on rank 0 with the temporary directory, which already holds everything
            else.
        ranks: the ranks.
    """
    model = built.model
    source = built.folder
    stored = built.stored
    # tied ones once
    stored_names = model.state_dict().keys()
    tensors = dict[str, torch.Tensor](model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in stored_names}
    # Training may hold frozen weights and buffers rounded to 16 bits.
    from_base = {
        name
        for name, tensor in tensors.items()
        if not tensor.requires_grad and name in stored.dtypes
    }
    from_base |= stored.untouched.keys()
    base_rows = None
    names = index_names(model)
    if ranks.is_main and from_base:
        base = open_model_weights(source, built).source
        base_rows = stored_rows(base, account_for(names, base.tensors, source))
    rows = _gathered(tensors, ranks, from_base, base_rows)
    layout = saved_layout(model, names, stored.conversions, tensors)
    dtype = save_dtype(settings.save_dtype)
    weights = SavedWeights(tensors, rows, dtype, stored.dtypes, layout, stored.untouched)

    def write(aside: Path) -> None:
        weights.write(aside, parse_size(settings.max_shard_size))
        write_model_settings(aside, model.config, weights.main_dtype(), tokenizer, source)
        write_card(aside)

    _write_from_ranks(folder, weights, write, ranks)


def export_adapter(
    built: BuiltModel,
    folder: Path,
    settings: CheckpointConfig,
    tokenizer: PreTrainedTokenizerBase,
    write_card: Write,
    ranks: Ranks,
) -> None:
    """Write the adapter as a PEFT directory. All ranks call it; rank 0 writes. For the arguments
    see `export_model`."""
    adapter = built.adapter
    assert adapter is not None
    weights = _adapter_weights(built, adapter, save_dtype(settings.save_dtype), ranks)

    def write(aside: Path) -> None:
        write_adapter(aside, adapter, weights, tokenizer, built.folder)
        write_card(aside)

    _write_from_ranks(folder, weights, write, ranks)


def export_policy(built: BuiltModel, folder: Path, ranks: Ranks, finish: Write) -> None:
    """Write the weights of the adapter as they are trained, and its settings: what a server needs
    that has the base model. All ranks call it; rank 0 writes, and calls `finish` with the temporary
    directory."""
    adapter = built.adapter
    assert adapter is not None
    weights = _adapter_weights(built, adapter, None, ranks)

    def write(aside: Path) -> None:
        _write_adapter_files(aside, adapter, weights)
        finish(aside)

    _write_from_ranks(folder, weights, write, ranks)


def _adapter_weights(
    built: BuiltModel, adapter: Adapter, dtype: torch.dtype | None, ranks: Ranks
) -> SavedWeights:
    tensors = dict[str, torch.Tensor]()
    for name, parameter in built.model.named_parameters():
        if name in adapter.keys:
            tensors[adapter.keys[name]] = parameter
    return SavedWeights(tensors, _gathered(tensors, ranks, set()), dtype)


def stored_rows(source: WeightSource, keys: Mapping[str, str]) -> Rows:
    """Return rows that are read from a file. `keys`: name of a tensor -> its name in `source`, if
    they differ."""

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        stored_name = keys.get(name, name)
        for block in blocks(source, stored_name):
            yield block.to(dtype)

    return rows


def _gathered(
    tensors: Mapping[str, torch.Tensor],
    ranks: Ranks,
    from_base: set[str],
    base_rows: Rows | None = None,
) -> Rows:
    """Return rows of sharded parameters, which the ranks send to rank 0. Rank 0 holds at most two
    shards of a parameter. Tensors named in `from_base` come from `base_rows`, which only rank 0
    has.

    All ranks meet after each tensor. Otherwise ranks of other copies of the model, which send
    nothing, would wait for the whole export in one collective, and their watchdogs would report
    that rank 0 hangs.
    """
    shard_group = ShardGroup(ranks)

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        tensor = tensors.get(name)
        if name in from_base or tensor is None:
            if base_rows is not None:
                yield from base_rows(name, dtype)
        elif isinstance(tensor, nn.Parameter):
            yield from shard_group.gather_rows(tensor, dtype)
        else:  # a buffer that the checkpoint lacks
            yield tensor.to(dtype).cpu()
        dist.barrier()

    return rows


def _write_from_ranks(folder: Path, weights: SavedWeights, write: Write, ranks: Ranks) -> None:
    if ranks.is_main:
        checkpoints = folder.parent / "checkpoints"
        advice = ""
        if checkpoints.is_dir():
            advice = f"The trained weights are in the newest directory of {checkpoints}."
        with written_aside(folder, advice) as aside:
            write(aside)
    else:
        for group in weights.groups:
            dtype = weights.dtypes[group.parameters[0]]
            for name in group.parameters:
                # Exhausting the iterator sends the rows to rank 0.
                deque(weights.rows(name, dtype), maxlen=0)
    dist.barrier()


@contextmanager
def written_aside(folder: Path, advice: str = "") -> Iterator[Path]:
    """Yield a temporary directory next to `folder`. It replaces `folder` at the end of the block,
    and is deleted after an error. Raises RunFailure if the disk cannot be written."""
    aside = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
    except OSError as error:
        raise RunFailure(
            f"{folder}: the model could not be written ({error.strerror or error}). {advice}"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_adapter(
    folder: Path,
    adapter: Adapter,
    weights: SavedWeights,
    tokenizer: PreTrainedTokenizerBase,
    base: Path,
) -> None:
    """Write a PEFT directory with the tokenizer and the generation config.

    Args:
        folder: an existing, empty directory.
        adapter: its config becomes adapter_config.json.
        weights: of the adapter, with PEFT's names.
        tokenizer: with the chat template of the run.
        base: directory of the base model.
    """
    _write_adapter_files(folder, adapter, weights)
    write_adapter_settings(folder, tokenizer, base)


def _write_adapter_files(folder: Path, adapter: Adapter, weights: SavedWeights) -> None:
    weights.write_file(folder / ADAPTER_WEIGHTS, range(len(weights.groups)))
    settings = copy.deepcopy(adapter.config)
    settings.inference_mode = True
    # The order of a set differs between processes.
    for name, value in list(vars(settings).items()):
        if isinstance(value, set):
            vars(settings)[name] = sorted(value)
    settings.save_pretrained(str(folder))


def copy_adapter(folder: Path, target: Path, base_model: str, finish: Finish) -> None:
    """Copy the files of a saved adapter, with a new model card. `finish` is called before they
    replace `target`. Probes, which hold text of samples, are not copied: exports are published."""
    with written_aside(target) as aside:
        for file in sorted(folder.iterdir()):
            is_of_adapter = matches(file.name, MODEL_PATTERNS) and file.name != PROBES_FILE
            if file.is_file() and is_of_adapter:
                shutil.copy(file, aside / file.name)
        write_model_card(aside, base_model, {PROMPT_FORMAT: recorded_prompt_format(folder)})
        finish(aside)


def write_model_card(
    folder: Path,
    base_model: str,
    trainer: Mapping[str, Any] | None = None,
    auto_class: str = "AutoModelForCausalLM",
) -> None:
    """Write README.md of a complete model or adapter directory: the model card on the Hugging Face
    Hub.

    Of local paths only the last part is written, because the card may be uploaded.

    Args:
        folder: holds adapter_config.json, or else a whole model.
        base_model: Hub name or directory of the base model, or demo.
        trainer: the run as in a checkpoint's trainer.json: step, metrics, config (sections of
            settings). None if the run of a merged adapter is unknown.
        auto_class: the class of Transformers that loads the base model.
    """
    run = trainer or {}
    base = _without_folder(base_model)
    settings = dict[str, Any]()
    for section in run.get("config", {}).values():
        settings |= section
    is_adapter = (folder / "adapter_config.json").exists()
    is_lora = settings.get("use_peft", True)
    method = METHOD_NAMES[settings.get("peft_method", "lora")]
    is_scored = auto_class == "AutoModelForSequenceClassification"
    is_on_hub = base_model != "demo" and not looks_local(base_model)
    header = dict[str, Any]()
    if is_on_hub:
        header["base_model"] = base_model
    header["library_name"] = "peft" if is_adapter else "transformers"
    header["pipeline_tag"] = "text-classification" if is_scored else "text-generation"
    header["tags"] = ["llama_ft", method.lower()] if is_lora else ["llama_ft"]
    header |= _header_of_tools(folder, run)
    what = f"{base}, full fine-tuning"
    load = f"model = {auto_class}.from_pretrained({PLACE})"
    set_pad = ""
    if is_adapter:
        what = f"A {method} adapter for {base}"
        from_base = base if is_on_hub else f"path/to/{base}"
        load = _load_adapter(run, auto_class, from_base)
        if is_scored:
            set_pad = "\nmodel.config.pad_token_id = tokenizer.pad_token_id"
    elif is_lora:
        what = f"{base} with a {method} adapter merged into it"
    facts = _facts(run, settings, is_lora)
    trained_on = _trained_on(settings, run.get("attempts", []))
    (folder / "README.md").write_text(f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {base}, fine-tuned

{what}{trained_on} with llama_ft.{"" if base == "demo" else " The base model's license applies to it, too."}

```python
from transformers import {auto_class}, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained({PLACE}){set_pad}
```

```yaml
{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}```
""")


def _header_of_tools(folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what llama_ft's own tools read in the header of a model card."""
    header = dict[str, Any]()
    copied = _copied_files(folder)
    if copied:
        header[COPIED_FILES] = copied  # so that --overwrite may delete them
    if run.get(PROMPT_FORMAT) == "text":
        header[PROMPT_FORMAT] = "text"
    return header


def _facts(run: Mapping[str, Any], settings: Mapping[str, Any], is_lora: bool) -> dict[str, Any]:
    """Return what the model card lists about the run: settings, the result and warnings."""
    shown = (*SHOWN, *CARD_SETTINGS_OF_LORA) if is_lora else SHOWN
    attempts = run.get("attempts", [])
    facts = {
        name: value_over_time(SETTINGS[name].dotted, settings[name], attempts)
        for name in shown
        if name in settings
    }
    if "step" in run:
        facts["optimizer steps"] = run["step"]
        facts["validation loss"] = run["metrics"].get("eval/loss")
        if run.get("leaks"):
            facts["warning"] = " ".join(run["leaks"])
    if run.get(PROMPT_FORMAT) == "text":
        facts["prompts"] = "text, without a chat template"
    return facts


def _trained_on(settings: Mapping[str, Any], attempts: Attempts) -> str:
    """Return the end of a sentence of the model card that names the dataset, and those before a
    resume that changed it; "" without one."""
    changes = [attempt["changed"].get("data.dataset") for attempt in attempts]
    datasets = [*(pair[0] for pair in changes if pair), settings.get("dataset")]
    paths = list[str]()
    for dataset in filter(None, datasets):
        mixture = [{"path": dataset}] if isinstance(dataset, str) else dataset
        paths += [_without_folder(part["path"]) for part in mixture]
    return f", trained on {', '.join(dict.fromkeys(paths))}" if paths else ""


def _copied_files(folder: Path) -> list[str]:
    """Return the names of the files in an export that are copies of the base model's, other than
    code."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix != ".py")
    copied = []
    for name in names:
        if not matches(name, MODEL_PATTERNS) and (folder / name).is_file():
            copied.append(name)
    return copied


def _load_adapter(run: Mapping[str, Any], auto_class: str, base: str) -> str:
    """Return the lines of Python that load an adapter on `base`, for the model card."""
    # the embeddings of new tokens are missing in the base
    new = run.get("new_tokens") or {"rows": 0, "stored_rows": 0}
    resize = ""
    if new["rows"] > new["stored_rows"]:
        resize = f"base.resize_token_embeddings({new['rows']}, mean_resizing=False)\n"
    is_scored = auto_class == "AutoModelForSequenceClassification"
    head = ", num_labels=1" if is_scored else ""
    return f"""from peft import PeftModel
base = {auto_class}.from_pretrained("{base}"{head})
{resize}model = PeftModel.from_pretrained(base, {PLACE})"""


def _without_folder(name: str) -> str:
    """Return a Hub name or a relative path unchanged, the last part of an absolute path, a URL
    without secrets."""
    without = Path(name).name if name.startswith(("/", "~")) else name
    return mask_secrets(name) if "://" in name else without
