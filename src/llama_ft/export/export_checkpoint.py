"""Export a checkpoint, or a saved adapter, as a model directory: on one process without a process
group, in blocks of rows. Names, layout, dtypes and the other files are the same as at the end of a
run.

An adapter is merged while its base model is read. W is a weight [out, in] of the base, B A the
product of the adapter's matrices, m DoRA's magnitude:

    LoRA, rsLoRA      W + scaling * B A; for stacked experts, for each of them
    DoRA              m * V / |V| per row, where V = W + scaling * B A       https://arxiv.org/abs/2402.09353
    modules_to_save   the adapter's own tensor replaces W; the same for trained biases
    new tokens        the adapter's rows replace those of W; embedding and LM head grow by missing rows

PEFT's merge_and_unload can merge other adapters, with the whole model in memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from pydantic import ValidationError
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft import data, models, training
from llama_ft.checkpoint.reader import Checkpoint, complete_checkpoints, step_folder
from llama_ft.checkpoint.resume import first_valid, result_step
from llama_ft.checkpoint.state import check_same_tensors
from llama_ft.config import (
    Config,
    ModelConfig,
    PeftConfig,
    with_present_names,
)
from llama_ft.config.paths import PROMPT_FORMAT, recorded_prompt_format
from llama_ft.errors import UserError
from llama_ft.export import weights as export
from llama_ft.export.export_settings import write_model_settings
from llama_ft.export.weights import (
    Finish,
    SavedWeights,
    leave_as_written,
    write_model_card,
    written_aside,
)
from llama_ft.models.adapters import lora
from llama_ft.models.adapters.adapter_config import ADAPTER_CONFIG, saved_config
from llama_ft.models.adapters.names import (
    ADAPTER_WEIGHTS,
    checkpoint_key,
    index_names,
)
from llama_ft.models.adapters.saved_adapter import (
    check_saved_adapter,
    differing_copies,
    left_out,
    other_base,
    other_content,
)
from llama_ft.models.architecture.new_tokens import TokenRows
from llama_ft.models.base.source import (
    OverlaidSource,
    SafetensorsSource,
    StoredTensor,
    WeightSource,
    blocks,
    listed,
)
from llama_ft.models.built import Adapter, settings_to_read
from llama_ft.models.model_config import untie
from llama_ft.models.weights.conversion import open_model_weights, saved_layout
from llama_ft.models.weights.load_weights import account_for
from llama_ft.phases import NULL_MONITOR
from llama_ft.runtime import log

# Settings of adapter_config.json that are supported. Any other setting must be at its default.
SUPPORTED_ADAPTER_KEYS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
# values of init_lora_weights
INIT_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
USE_PEFT = "merge_and_unload of PEFT merges it, with the whole model in memory."
# rows of the base, index of the first -> merged rows
Change = Callable[[torch.Tensor, int], torch.Tensor]
ReadPart = Callable[[str], torch.Tensor]  # lora_A or another part of a layer -> its tensor in fp32


def find_valid(place: Path) -> Checkpoint:
    """Open a checkpoint after comparing all its bytes with their checksums.

    Args:
        place: checkpoints/step-000100, or a run's directory, for the best (after early stopping) or
            newest valid one.

    Raises:
        RunFailure: the checkpoint, or all of the run's, are corrupted.
    """
    candidates = complete_checkpoints(place)
    newest = first_valid(candidates or [place])
    if candidates and newest.trainer.get("ends_run"):
        step = result_step(
            recorded_config(newest), newest.step, int(newest.trainer["progress"]["best"]["step"])
        )
        if step != newest.step:
            return first_valid([step_folder(newest.run, step), newest.folder])
    return newest


@dataclass(frozen=True)
class Exporter:
    """The trained weights, and everything else that is needed to write a model or an adapter.

    Attributes:
        base: directory of the base model.
        base_name: the user's name for it.
        tokenizer: the tokenizer to save.
        built: the model on the meta device; with LoRA it contains the adapter.
        trained: the trained weights.
        keys: trained parameter of the model -> its name in `trained`.
        new: tokens that the base model lacks.
        config: of the run; the defaults for a saved adapter.
        trainer: the run as described on the model card, or None.
    """

    base: Path
    base_name: str
    tokenizer: PreTrainedTokenizerBase
    built: models.BuiltModel
    trained: WeightSource
    keys: dict[str, str]
    new: models.NewTokens | None
    config: Config
    trainer: dict[str, Any] | None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, with LoRA."""
        return self.built.adapter

    @classmethod
    def prepare(
        cls,
        checkpoint: Checkpoint,
        build_model: models.BuildModel,
        base_model: str | None,
        tokenizer_name: str | None,
        trust_remote_code: bool,
        merge: bool,
    ) -> "Exporter":
        """Find the base model of a checkpoint and check that they fit.

        Args:
            checkpoint: a valid checkpoint.
            build_model: the recipe's function.
            base_model: current place of the base model; None: where the run found it.
            tokenizer_name: the same for the tokenizer.
            trust_remote_code: must be given for this export, even if the run had it.
            merge: merge an adapter, which needs the weights of the base model.

        Raises:
            UserError: the base model does not exist, does not fit, or needs code that is not
                allowed to run.
        """
        trainer = checkpoint.trainer
        config = recorded_config(checkpoint)
        if config.model.trust_remote_code and not trust_remote_code:
            raise UserError(
                f"{checkpoint.folder}: its run had --trust_remote_code. Add it to run the model's code."
            )
        named = base_model or config.model.model_name
        if named == "demo":
            base = data.build_demo(data.cache_dir()).model_dir
        else:
            place = f"{checkpoint.folder} (--base_model overrides it): base model"
            reads_base = merge or not config.peft.use_peft
            base = models.local_folder(named, place, weights=reads_base)
        recorded = (trainer.get("contents") or {}).get("model_name")
        if base_model and (warning := other_content(checkpoint.folder, recorded, named, base)):
            log.warning(warning)
        new = models.NewTokens(**trainer["new_tokens"]) if trainer.get("new_tokens") else None
        settings = settings_to_read(config, trust_remote_code)
        settings = replace(settings, model=replace(settings.model, model_name=named))
        has_score = config.preference.entry.has_score
        built = _skeleton(build_model, settings, base, new, has_score)
        parameters = built.model.named_parameters()
        expected = {
            f"model.{name}": parameter for name, parameter in parameters if parameter.requires_grad
        }
        check_same_tensors(checkpoint, expected, "model.")
        other = tokenizer_name or config.model.tokenizer_name
        folder = models.local_folder(other, "--tokenizer_name", weights=False) if other else base
        tokenizer = models.load_tokenizer(folder, trust_remote_code)
        tokenizer.chat_template = trainer["chat_template"]
        if tokenizer.chat_template and config.model.resize_embeddings:
            data.ensure_chat_template(tokenizer, add_tokens=True)
        if built.has_score:
            training.set_pad_token(built.model.config, tokenizer, built.model.config.vocab_size)
        trained = checkpoint.weights()
        keys = {name: name for name in trained.tensors}
        return cls(base, named, tokenizer, built, trained, keys, new, config, trainer)

    @classmethod
    def of_adapter(
        cls,
        folder: Path,
        build_model: models.BuildModel,
        base: Path,
        base_name: str,
        trust_remote_code: bool,
    ) -> "Exporter":
        """Open a saved adapter to merge it.

        Args:
            folder: a directory saved by PEFT.
            build_model: the recipe's function.
            base: directory of the model before quantization.
            base_name: its name on the model card.
            trust_remote_code: the base model may bring its own code.

        Raises:
            UserError: this kind of adapter cannot be merged, or it does not fit the base model.
        """
        settings = understood_adapter(folder)
        file = folder / ADAPTER_WEIGHTS
        new = tokens_added(settings, models.load_model_config(base, trust_remote_code))
        config = settings_to_read(
            Config(
                model=ModelConfig(model_name=str(base)),
                peft=PeftConfig(use_peft=True, from_peft_checkpoint=str(folder)),
            ),
            trust_remote_code,
        )
        has_score = settings.task_type == "SEQ_CLS"
        built = _skeleton(build_model, config, base, new, has_score)
        adapter = built.adapter
        assert adapter is not None
        trained = SafetensorsSource([file])
        tokenizer = models.load_tokenizer(
            folder if any(folder.glob("tokenizer*")) else base, trust_remote_code
        )
        if built.has_score:
            training.set_pad_token(built.model.config, tokenizer, built.model.config.vocab_size)
        about = {PROMPT_FORMAT: recorded_prompt_format(folder)}
        exporter = cls(
            base, base_name, tokenizer, built, trained, adapter.keys, new, Config(), about
        )
        exporter._changes()  # reports unsupported kinds of layers before their tensors are compared
        names = index_names(built.model)
        copies = check_saved_adapter(trained.tensors, built, names, file, str(base))
        if copies:
            stored = open_model_weights(base, built).source
            problem = differing_copies(file, copies, names, stored)
            if problem:
                raise UserError(problem)
            log.info(left_out(file, copies))
        if warning := other_base(folder, base_name, base):
            log.warning(warning)
        return exporter

    def write_model(
        self,
        folder: Path,
        save_dtype: torch.dtype | None,
        max_shard_bytes: int,
        finish: Finish = leave_as_written,
    ) -> None:
        """Write a whole model: the fully fine-tuned one, or the base model with the adapter merged
        into it.

        Args:
            folder: target directory; its content is replaced.
            save_dtype: of all floating tensors; None: the dtype of each in the base model.
            max_shard_bytes: maximum size of a file.
            finish: called with the temporary directory when all files are written.

        Raises:
            UserError: the base model is quantized, its weights do not fit its config.json, or this
                kind of adapter cannot be merged here.
            RunFailure: the disk is full.
        """
        weights = self._merged(save_dtype)
        base_config = models.load_model_config(self.base, self.config.model.trust_remote_code)
        if description := models.describe_published(self.base, base_config):
            log.info(f"{description} To quantize the result again, use for example llm-compressor.")
        with written_aside(folder) as aside:
            write_model_settings(
                aside, self.built.model.config, weights.main_dtype(), self.tokenizer, self.base
            )
            weights.write(aside, max_shard_bytes)
            self._write_card(aside)
            finish(aside)

    def write_adapter(
        self,
        folder: Path,
        save_dtype: torch.dtype | None,
        finish: Finish = leave_as_written,
    ) -> None:
        """Write a PEFT directory. Arguments as in write_model; save_dtype None: as trained, usually
        fp32."""
        assert self.adapter is not None
        keys = self.adapter.keys
        names = {
            keys[name]: self.keys[name]
            for name, _ in self.built.model.named_parameters()
            if name in keys
        }
        tensors = {key: self.trained.tensors[name] for key, name in names.items()}
        weights = SavedWeights(tensors, export.stored_rows(self.trained, names), save_dtype)
        with written_aside(folder) as aside:
            export.write_adapter(aside, self.adapter, weights, self.tokenizer, self.base)
            self._write_card(aside)
            finish(aside)

    def _write_card(self, folder: Path) -> None:
        auto = models.auto_class(self.built.model.config, self.config.model.trust_remote_code)
        write_model_card(folder, self.base_name, self.trainer, auto.__name__)

    def _merged(self, save_dtype: torch.dtype | None) -> SavedWeights:
        """Return the weights of the merged model. Writing them takes the memory of a few blocks of
        rows and the mapped files. If embedding and LM head are no longer tied, the model's config
        is changed."""
        self._check_merge()
        model = self.built.model
        base, conversions, names = open_model_weights(self.base, self.built)
        changes = self._changes()
        keys = account_for(names, base.tensors, self.base)
        source = OverlaidSource(base, self.trained)
        replaced = dict[str, str]()
        for name, weight in names.weights.items():
            if name in self.keys:
                replaced |= dict.fromkeys(weight.keys, self.keys[name])
        # parameter -> each of its names in the checkpoint -> what it is made of
        merged = dict[str, dict[str, tuple[str, Change | None]]]()
        for name, weight in names.weights.items():
            if ".modules_to_save." not in name:
                merged[name] = {
                    key: (replaced.get(key, keys[name]), changes.get(key)) for key in weight.keys
                }
        split = [tuple(values) for values in merged.values() if len(set(values.values())) > 1]
        if split:  # embedding and LM head were tied, but now differ
            _check_untied(
                model, split, [tuple(values) for values in merged.values() if len(values) > 1]
            )
            untie(model.config)
        written = dict[str, tuple[str, Change | None]]()
        tensors = dict[str, StoredTensor]()
        for name, values in merged.items():
            own = list(values) if tuple(values) in split else list(values)[:1]
            written |= {key: values[key] for key in own}
            tensors |= dict.fromkeys(own, base.tensors[keys[name]])
        saved = model.state_dict().keys()
        for name, key in names.buffers.items():
            if name in saved and key in base.tensors:  # Transformers computes the other buffers
                written[key] = (key, None)
                tensors[key] = base.tensors[key]

        def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
            key, change = written[name]
            start = 0
            for block in blocks(source, key):
                yield (change(block, start) if change else block).to(dtype)
                start += len(block) if block.dim() else 1

        # Only the shapes of these tensors are used.
        layout = saved_layout(model, names, conversions, tensors)  # type: ignore[arg-type]
        untouched = {name: header for name, header in base.tensors.items() if header.is_untouched}
        written |= {name: (name, None) for name in untouched}
        return SavedWeights(tensors, rows, save_dtype, groups=layout, untouched=untouched)

    def _check_merge(self) -> None:
        """Raise a UserError if the base model is quantized, or the adapter has a setting that a merge
        would ignore."""
        if getattr(self.built.model.config, "quantization_config", None) is not None:
            raise UserError(
                f"{self.base}: quantized. --base_model names the unquantized model that it was made from."
            )
        if self.adapter is not None:
            check_settings(self.adapter.config.to_dict(), "--merge")

    def _trained_keys(self) -> dict[int, str]:
        return {
            id(parameter): self.keys[name]
            for name, parameter in self.built.model.named_parameters()
            if name in self.keys
        }

    def _changes(self) -> dict[str, Change]:
        """Return key of the base -> its change by the adapter; tied keys with the same change get
        the same object. Raises a UserError if this kind of layer cannot be merged here."""
        changes = dict[str, Change]()
        by_key = dict[str, Change]()
        keys = self._trained_keys()
        # Blocks of rows are changed one by one: keep A, B and magnitude of the current layer only.
        read = lru_cache(maxsize=3)(self._read)
        for name, module in self.built.model.named_modules():
            target = checkpoint_key(f"{name}.base_layer.weight")
            if isinstance(module, ParamWrapper):
                changes[checkpoint_key(f"{name}.{module.parameter_name}")] = self._stacked(
                    partial(read, name), module
                )
            elif isinstance(module, LoraLayer):
                changes[target] = self._low_rank(partial(read, name), name, module)
            elif isinstance(module, TokenRows):
                key = keys[id(module.trainable_tokens_delta["default"])]
                put_rows = partial(_with_rows, self.trained, key, module.token_indices["default"])
                changes[target] = by_key.setdefault(key, put_rows)
        return changes

    def _read(self, name: str, part: str) -> torch.Tensor:
        return self.trained.read(self.keys[f"{name}.{part}.default.weight"]).float()

    def _stacked(self, read: ReadPart, layer: ParamWrapper) -> Change:
        """Add each expert's B A, in fp32. A is stacked as [experts * r, in] and B as [out, r *
        experts]: in B, the columns of an expert are `experts` apart. A parameter with two
        dimensions is a single expert."""
        scaling = layer.scaling["default"]
        experts = layer.num_experts
        is_matrix = layer.get_param().dim() == 2
        # weight of shape [experts, in, out]
        is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)

        def change(block: torch.Tensor, start: int) -> torch.Tensor:
            left = read("lora_B")
            right = read("lora_A")
            rows = slice(start, start + len(block))
            if is_matrix:
                return torch.addmm(block.float(), left[rows] * scaling, right)
            by_expert = left.unflatten(1, (-1, experts)).permute(2, 0, 1)
            left = by_expert[rows]  # [block, out, r]
            right = right.unflatten(0, (experts, -1))[rows]  # [block, r, in]
            if is_transposed:
                left, right = right.transpose(1, 2), left.transpose(1, 2)
            return torch.baddbmm(block.float(), left * scaling, right)

        return change

    def _low_rank(self, read: ReadPart, name: str, layer: LoraLayer) -> Change:
        """Add B A in fp32. With DoRA, also scale the rows."""
        base = layer.get_base_layer()
        scaling = layer.scaling["default"]
        if not isinstance(base, (nn.Linear, Conv1D)):
            raise UserError(
                f"{name} is a {type(base).__name__}; merging it is not supported.\n{USE_PEFT}"
            )

        def change(block: torch.Tensor, start: int) -> torch.Tensor:
            rows = slice(start, start + len(block))
            left = read("lora_B")
            right = read("lora_A")
            if isinstance(base, Conv1D):  # its weight has the shape [in, out]
                left, right = right.T, left.T
            merged = torch.addmm(block.float(), left[rows] * scaling, right)
            if f"{name}.lora_magnitude_vector.default.weight" in self.keys:
                magnitude = read("lora_magnitude_vector")[rows]
                merged *= (magnitude / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
            return merged

        return change


def _check_untied(
    model: PreTrainedModel, split: list[tuple[str, ...]], ties: list[tuple[str, ...]]
) -> None:
    """Raise a UserError if other weights than those of embedding and LM head would have to be
    untied: config.json can only say that nothing is tied.

    Args:
        model: with the adapter.
        split: the names of tied weights that the adapter makes different.
        ties: the names of all tied weights.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    of_words = {
        checkpoint_key(f"{name}.weight") for name, module in model.named_modules() if module in ends
    }
    shared = [names for names in split if not of_words.issuperset(names)]
    modules = sorted({_common_end(names).rpartition(".")[0] for names in shared})
    if shared:
        first, second = shared[0][:2]
        raise UserError(
            f"{first} and {second} are one weight of the base model, which the adapter changes differently. "
            "A merged model cannot hold both.\nUse the adapter as it is, or train one without "
            f"{listed(modules)}: exclude_modules in --peft.options."
        )
    others = [names for names in ties if not of_words.issuperset(names)]
    if others:
        raise UserError(
            "The adapter changes only one of embedding and LM head, which are tied. This model also shares "
            f"{others[0][0]} with {others[0][1]}, and config.json can only untie all of them.\n"
            "Use the adapter as it is, or train one that changes both or none."
        )


def _common_end(names: tuple[str, ...]) -> str:
    parts = [name.split(".")[::-1] for name in names]
    common = takewhile(lambda several: len(set(several)) == 1, zip(*parts, strict=False))
    return ".".join([several[0] for several in common][::-1])


def _with_rows(
    trained: WeightSource, key: str, ids: list[int], block: torch.Tensor, start: int
) -> torch.Tensor:
    merged = block.to(torch.float32, copy=True)  # copy, because the block may be the mapped file
    for place, id_ in enumerate(ids):
        if start <= id_ < start + len(block):
            merged[id_ - start] = trained.read_rows(key, place, place + 1)[0]
    return merged


def _skeleton(
    build_model: models.BuildModel,
    settings: Config,
    base: Path,
    new: models.NewTokens | None,
    has_score: bool,
) -> models.BuiltModel:
    config = models.load_model_config(base, settings.model.trust_remote_code)
    models.choose_head(config, has_score)
    # An export copies what is stored, and a merge rejects a base in bitsandbytes' 4 bits.
    is_published = models.published_format(config.to_dict()) is not None
    quantization_config = models.remove_quantization_config(config)
    request = models.ModelRequest(settings, base, config, new, purpose="read")
    built = build_model(request, None, NULL_MONITOR)
    if quantization_config is not None and not is_published:
        built.model.config.quantization_config = quantization_config
    return built


def recorded_config(checkpoint: Checkpoint) -> Config:
    """Return the settings of the run that wrote a checkpoint.

    Raises:
        UserError: it was written by another version of llama_ft, with settings that this version
            does not know.
    """
    try:
        return Config(**with_present_names(checkpoint.trainer["config"]))
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{checkpoint.folder}: written by another version of llama_ft ({error})."
        ) from error


def understood_adapter(adapter: Path) -> LoraConfig:
    """Return the settings of a saved adapter. Raises the errors of check_settings."""
    # an unreadable file is an error of saved_config
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        stored = json.loads((adapter / ADAPTER_CONFIG).read_text())
        check_settings(stored, str(adapter))
    config: LoraConfig = saved_config(adapter)
    return config


def check_settings(settings: Mapping[str, Any], place: str) -> None:
    """Raise a UserError if a setting of an adapter is not supported here, because the merged model
    would be wrong."""
    supported = {
        "init_lora_weights": INIT_KEEPS_BASE,
        "task_type": (None, "CAUSAL_LM", "SEQ_CLS"),
        "peft_type": ("LORA",),
    }
    others = []
    for name, value in settings.items():
        is_default = not value or value == getattr(LoraConfig, name, None)
        is_supported = name in SUPPORTED_ADAPTER_KEYS or is_default
        if name in supported:
            is_supported = value in supported[name]
        if not is_supported:
            others.append(f"{name} = {value}")
    if others:
        raise UserError(
            f"{place}: an adapter with {', '.join(others)} is not supported here.\n{USE_PEFT}"
        )


def tokens_added(adapter: LoraConfig, model_config: PretrainedConfig) -> models.NewTokens | None:
    """Return the tokens whose embeddings a saved adapter trains, or None."""
    ids = sorted(lora.rows_trained(adapter))
    if not ids:
        return None
    stored_rows = models.vocabulary_size(model_config) or 0
    return models.NewTokens(ids, stored_rows, rows=max(stored_rows, ids[-1] + 1))
