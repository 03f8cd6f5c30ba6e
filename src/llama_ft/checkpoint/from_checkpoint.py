"""A checkpoint as a model directory: on one process, without a process group, a block of rows at a time.

    full fine-tuning   trained tensors from the checkpoint, frozen ones and buffers from the base model
    LoRA               the adapter as peft saves it, or merged into the base model

Names, layout, dtypes and the files beside the weights are those that a run writes at its end.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models
from llama_ft.checkpoint import export
from llama_ft.checkpoint.export import SavedWeights, written_aside
from llama_ft.checkpoint.merge import merge_adapter
from llama_ft.checkpoint.model_card import write_model_card
from llama_ft.checkpoint.reader import TRAINER_FILE, Checkpoint, complete_checkpoints, step_folder
from llama_ft.checkpoint.resume import first_valid, result_step
from llama_ft.checkpoint.state import check_same_tensors
from llama_ft.config import Config, ModelConfig
from llama_ft.errors import RunFailure, UserError
from llama_ft.models.conversion import open_source, saved_layout
from llama_ft.models.load_weights import account_for
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
    best = step_folder(newest.run, step)
    if best == newest.folder:
        return newest
    log.info(f"{newest.run} ended after step {newest.step}; its result is step {step}, with the best validation loss.")
    return first_valid([best, newest.folder])


@dataclasses.dataclass(frozen=True)
class Exporter:
    """A checkpoint, and what else is needed to make something of it.

    Attributes:
        checkpoint: valid.
        config: of its run.
        base: directory of the base model.
        base_name: what the user called it.
        tokenizer: as the run saves it.
        new: tokens whose rows the base lacks.
        model: skeleton; with LoRA the adapter is in it.
        adapter: with LoRA.
        trust_remote_code: whether the base may bring code of its own.
    """

    checkpoint: Checkpoint
    config: Config
    base: Path
    base_name: str
    tokenizer: PreTrainedTokenizerBase
    new: models.NewTokens | None
    model: PreTrainedModel
    adapter: models.Adapter | None
    trust_remote_code: bool

    @classmethod
    def prepare(
        cls,
        checkpoint: Checkpoint,
        base_model: str | None,
        tokenizer_name: str | None,
        trust_remote_code: bool,
        merge: bool,
    ) -> "Exporter":
        """Find the base model and check that the checkpoint fits it.

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
            recorded = f"{checkpoint.folder / TRAINER_FILE} (--base_model overrides it): base model"
            base = models.local_folder(named, "--base_model" if base_model else recorded, weights=reads_weights)
        weights_then = trainer.get("contents", {}).get("model_name")
        if base_model is None and reads_weights and weights_then not in (None, models.fingerprint(base)):
            log.warning(f"{base} holds another model than when {checkpoint.folder} was written.")
        new = models.NewTokens(**trainer["new_tokens"]) if trainer.get("new_tokens") else None
        settings = ModelConfig(model_name=str(base), trust_remote_code=trust_remote_code)
        model, adapter = models.build_on_meta(models.load_model_config(base, trust_remote_code), settings, new), None
        if config.peft.use_peft:
            adapter = models.inject_lora(model, config.peft, models.portable_name(named, base), new)
        if config.model.freeze_layers:
            models.freeze_first_layers(model, config.model.num_freeze_layers)
        check_same_tensors(
            checkpoint, {f"model.{n}": p for n, p in model.named_parameters() if p.requires_grad}, "model."
        )
        named_tokenizer, folder = tokenizer_name or config.model.tokenizer_name, base
        if named_tokenizer is not None:
            folder = models.local_folder(named_tokenizer, "--tokenizer_name", weights=False)
        tokenizer = models.load_tokenizer(folder, trust_remote_code)
        tokenizer.chat_template = trainer["chat_template"]
        if tokenizer.chat_template and config.model.resize_embeddings:
            data.add_missing_tokens(tokenizer, data.own_template(tokenizer))
        return cls(checkpoint, config, base, named, tokenizer, new, model, adapter, trust_remote_code)

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
        trained = self.checkpoint.weights()
        of_base, of_checkpoint = export.stored_rows(source, keys), export.stored_rows(trained, {})

        def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
            return (of_checkpoint if name in trained.tensors else of_base)(name, dtype)

        held = {**keys, **source.tensors}  # what else is saved, transformers computes: buffers that the base lacks
        tensors = {name: tensor for name, tensor in export.saved_tensors(self.model).items() if name in held}
        weights = SavedWeights(tensors, rows, save_dtype, stored, saved_layout(self.model, tensors))
        log.info(f"{len(trained.tensors)} of {len(weights.tensors)} tensors are the checkpoint's")
        with written_aside(folder, needed=weights.nbytes) as aside:
            export.write_model_settings(aside, self.model.config, weights.main_dtype(), self.tokenizer, self.base)
            weights.write(aside, max_shard_bytes)
            write_model_card(aside, self.base_name, self.checkpoint.trainer)

    def write_adapter(self, folder: Path, save_dtype: torch.dtype | None) -> None:
        """Write a peft folder; arguments as of write_model, None for fp32 or what else was trained."""
        assert self.adapter is not None
        weights = self._adapter_weights(save_dtype)
        with written_aside(folder, needed=weights.nbytes) as aside:
            export.write_adapter(aside, self.adapter, weights, self.tokenizer)
            write_model_card(aside, self.base_name, self.checkpoint.trainer)

    def write_merged(self, folder: Path, save_dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        """Write the base with the adapter merged into it, through a peft folder that is deleted afterwards. Arguments
        as of write_model."""
        assert self.adapter is not None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".writing-{folder.name}-", dir=folder.parent) as aside:
                export.write_adapter(Path(aside), self.adapter, self._adapter_weights(None), self.tokenizer)
                about = (self.base_name, self.checkpoint.trainer)
                merge_adapter(
                    Path(aside), self.base, folder, save_dtype, max_shard_bytes, self.trust_remote_code, *about
                )
        except OSError as error:
            raise RunFailure(f"{folder}: the adapter could not be written beside it ({error.strerror}).") from error

    def _adapter_weights(self, save_dtype: torch.dtype | None) -> SavedWeights:
        assert self.adapter is not None
        trained, keys = self.checkpoint.weights(), self.adapter.keys
        names = {keys[name]: name for name, _ in self.model.named_parameters() if name in keys}
        tensors = {key: trained.tensors[name] for key, name in names.items()}
        return SavedWeights(tensors, export.stored_rows(trained, names), save_dtype)


def recorded_config(checkpoint: Checkpoint) -> Config:
    """The settings of the run that wrote a checkpoint.

    Raises:
        UserError: another version of this program wrote it, with settings that this one does not know.
    """
    try:
        return Config(**checkpoint.trainer["config"])
    except (ValidationError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint.folder}: settings of another version of llama_ft ({error}).") from error
