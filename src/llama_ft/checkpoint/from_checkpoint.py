"""A checkpoint as a model directory: on one process, without a process group, a block of rows at a time.

Names, layout, dtypes and the files beside the weights are those that a run writes at its end.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models
from llama_ft.checkpoint import export
from llama_ft.checkpoint.export import SavedWeights, written_aside
from llama_ft.checkpoint.merge import adapter_changes, check_settings, merged_weights, tokens_added, understood_adapter
from llama_ft.checkpoint.model_card import write_model_card
from llama_ft.checkpoint.reader import Checkpoint, complete_checkpoints, step_folder
from llama_ft.checkpoint.resume import first_valid, result_step
from llama_ft.checkpoint.state import check_same_tensors
from llama_ft.config import Config, ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import lora
from llama_ft.models.conversion import open_source, saved_layout
from llama_ft.models.load_weights import account_for
from llama_ft.models.source import OverlaidSource, SafetensorsSource, WeightSource
from llama_ft.runtime import log


def find_valid(place: Path) -> Checkpoint:
    """Open a checkpoint, or of a run the one whose weights are its result: after early stopping the best, else the
    newest valid one. Every byte is compared with its checksum first.

    Args:
        place: checkpoints/step-000100, or a run's directory.

    Raises:
        RunFailure: it is corrupted, or all of the run's are.
    """
    candidates = complete_checkpoints(place)
    newest = first_valid(candidates or [place])
    if not candidates or not newest.trainer.get("ends_run"):
        return newest
    step = result_step(recorded_config(newest), newest.step, int(newest.trainer["progress"]["best"]["step"]))
    if step == newest.step:
        return newest
    log.info(f"{newest.run} ended after step {newest.step}; its result is step {step}, with the best validation loss.")
    return first_valid([step_folder(newest.run, step), newest.folder])


@dataclasses.dataclass(frozen=True)
class Exporter:
    """What was trained, and what else is needed to make a model or an adapter of it.

    Attributes:
        base: directory of the base model.
        base_name: what the user called it.
        tokenizer: as it is saved.
        model: skeleton; with LoRA the adapter is in it.
        trained: the trained weights.
        keys: trained parameter of the model -> its name in `trained`.
        adapter: with LoRA.
        new: tokens whose rows the base lacks.
        config: of the run; the defaults for a saved adapter.
        trainer: what the model card says of the run, if anything is known.
    """

    base: Path
    base_name: str
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    trained: WeightSource
    keys: dict[str, str]
    adapter: models.Adapter | None
    new: models.NewTokens | None
    config: Config
    trainer: dict[str, Any] | None

    @classmethod
    def prepare(
        cls,
        checkpoint: Checkpoint,
        base_model: str | None,
        tokenizer_name: str | None,
        trust_remote_code: bool,
        merge: bool,
    ) -> "Exporter":
        """Find the base model of a checkpoint and check that they fit.

        Args:
            checkpoint: valid.
            base_model: where the base is now; None: where the run found it.
            tokenizer_name: the same of the tokenizer.
            trust_remote_code: given for this export; that the run had it is not enough.
            merge: whether an adapter is to be merged, for which the base's weights are needed.

        Raises:
            UserError: the base is not to be found, does not fit, or brings code that may not run.
        """
        trainer, config = checkpoint.trainer, recorded_config(checkpoint)
        if config.model.trust_remote_code and not trust_remote_code:
            raise UserError(f"{checkpoint.folder}: its run had --trust_remote_code. Add it here too, or it is not run.")
        named, reads_weights = base_model or config.model.model_name, merge or not config.peft.use_peft
        if named == "demo":
            base = data.build_demo(data.cache_dir()).model_dir
        else:
            place = "--base_model" if base_model else f"{checkpoint.folder} (--base_model overrides it): base model"
            base = models.local_folder(named, place, weights=reads_weights)
        new = models.NewTokens(**trainer["new_tokens"]) if trainer.get("new_tokens") else None
        settings = ModelConfig(model_name=str(base), trust_remote_code=trust_remote_code)
        model, adapter = models.build_on_meta(models.load_model_config(base, trust_remote_code), settings, new), None
        if config.peft.use_peft:
            adapter = models.inject_lora(model, config.peft, models.portable_name(named, base), new)
        if config.model.freeze_layers:
            models.freeze_first_layers(model, config.model.num_freeze_layers)
        expected = {f"model.{name}": p for name, p in model.named_parameters() if p.requires_grad}
        check_same_tensors(checkpoint, expected, "model.")
        other = tokenizer_name or config.model.tokenizer_name
        folder = models.local_folder(other, "--tokenizer_name", weights=False) if other else base
        tokenizer = models.load_tokenizer(folder, trust_remote_code)
        tokenizer.chat_template = trainer["chat_template"]
        if tokenizer.chat_template and config.model.resize_embeddings:
            data.ensure_chat_template(tokenizer, add_tokens=True)
        trained = checkpoint.weights()
        keys = {name: name for name in trained.tensors}
        return cls(base, named, tokenizer, model, trained, keys, adapter, new, config, trainer)

    @classmethod
    def of_adapter(cls, folder: Path, base: Path, base_name: str, trust_remote_code: bool) -> "Exporter":
        """Open a saved adapter, to be merged.

        Args:
            folder: as PEFT saves it.
            base: directory of the model as it was before quantization.
            base_name: what the model card calls it.
            trust_remote_code: whether the base may bring code of its own.

        Raises:
            UserError: the adapter is of a kind that cannot be merged, or does not fit the base.
        """
        settings, config = understood_adapter(folder), models.load_model_config(base, trust_remote_code)
        new = tokens_added(settings, config)
        wanted = ModelConfig(model_name=str(base), trust_remote_code=trust_remote_code)
        model = models.build_on_meta(config, wanted, new)
        file, adapter = folder / lora.ADAPTER_WEIGHTS, lora.inject_adapter(model, settings)
        trained = SafetensorsSource([file])
        adapter_changes(model, adapter.keys, trained)  # names a kind of layer that is not merged before its tensors
        lora.check_saved_adapter(trained.tensors, model, adapter, file, str(base))
        tokenizer = models.load_tokenizer(folder if any(folder.glob("tokenizer*")) else base, trust_remote_code)
        return cls(base, base_name, tokenizer, model, trained, adapter.keys, adapter, new, Config(), None)

    def write_model(self, folder: Path, save_dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        """Write a fully fine-tuned model.

        Args:
            folder: where to; what it holds is replaced.
            save_dtype: of all tensors; None: what each has in the base.
            max_shard_bytes: largest file.

        Raises:
            UserError: the base's weights are not those of its config.json.
            RunFailure: the disk is full.
        """
        source = open_source(self.base, self.model)
        keys = account_for(self.model, source.tensors, self.base)
        stored = {name: source.tensors[key].dtype for name, key in keys.items()}
        rows = export.stored_rows(OverlaidSource(source, self.trained), keys | self.keys)
        held = {**keys, **source.tensors}  # what else is saved, transformers computes: buffers that the base lacks
        tensors = {name: tensor for name, tensor in export.saved_tensors(self.model).items() if name in held}
        layout = saved_layout(self.model, tensors)
        self._write(folder, SavedWeights(tensors, rows, save_dtype, stored, layout), max_shard_bytes)

    def write_merged(self, folder: Path, save_dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        """Write the base with the adapter merged into it; arguments and errors as of write_model."""
        assert self.adapter is not None
        check_settings(self.adapter.config.to_dict(), "--merge")
        changes = adapter_changes(self.model, self.keys, self.trained)
        self._write(folder, merged_weights(self.model, changes, self.base, save_dtype), max_shard_bytes)

    def _write(self, folder: Path, weights: SavedWeights, max_shard_bytes: int) -> None:
        with written_aside(folder) as aside:
            export.write_model_settings(aside, self.model.config, weights.main_dtype(), self.tokenizer, self.base)
            weights.write(aside, max_shard_bytes)
            write_model_card(aside, self.base_name, self.trainer)

    def write_adapter(self, folder: Path, save_dtype: torch.dtype | None) -> None:
        """Write a peft folder; arguments as of write_model, None for fp32 or what else was trained."""
        assert self.adapter is not None
        keys = self.adapter.keys
        names = {keys[name]: self.keys[name] for name, _ in self.model.named_parameters() if name in keys}
        tensors = {key: self.trained.tensors[name] for key, name in names.items()}
        weights = SavedWeights(tensors, export.stored_rows(self.trained, names), save_dtype)
        with written_aside(folder) as aside:
            export.write_adapter(aside, self.adapter, weights, self.tokenizer)
            write_model_card(aside, self.base_name, self.trainer)


def recorded_config(checkpoint: Checkpoint) -> Config:
    """The settings of the run that wrote a checkpoint.

    Raises:
        UserError: another version of this program wrote it, with settings that this one does not know.
    """
    try:
        return Config(**checkpoint.trainer["config"])
    except (ValidationError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint.folder}: settings of another version of llama_ft ({error}).") from error
