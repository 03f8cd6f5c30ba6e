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
from llama_ft.checkpoint.export import (
    adapter_tensors,
    check_space,
    group_headers,
    saved_dtypes,
    saved_tensors,
    write_adapter,
    write_model_settings,
    write_weights,
    written_aside,
)
from llama_ft.checkpoint.merge import merge_adapter
from llama_ft.checkpoint.model_card import write_model_card
from llama_ft.checkpoint.reader import TRAINER_FILE, Checkpoint, checkpoint_errors, complete_checkpoints, step_folder
from llama_ft.checkpoint.resume import result_step
from llama_ft.config import Config, adapter_problem
from llama_ft.config.messages import size_text
from llama_ft.errors import RunFailure, UserError
from llama_ft.models.conversion import open_source, saved_layout
from llama_ft.models.load_weights import account_for, compute_buffers
from llama_ft.models.source import WeightSource, blocks
from llama_ft.runtime import log

NOTHING_LEFT = "Nothing is left of it."


def find_valid(place: Path) -> Checkpoint:
    """Open a checkpoint, or of a run the one whose weights are its result: after early stopping the best, else the
    newest valid one. Every byte is compared with its checksum first.

    Args:
        place: checkpoints/step-000100, or a run's directory.

    Raises:
        RunFailure: it is corrupted, or all of the run's are.
    """
    candidates = complete_checkpoints(place)
    for folder in candidates or [place]:
        problems = checkpoint_errors(folder)
        if not problems:
            found = Checkpoint(folder)
            return _result_of_run(found) if candidates else found
        listed = "\n".join(problems)
        if not candidates:
            raise RunFailure(f"{folder}: this checkpoint is damaged, and nothing is made of it.\n{listed}")
        log.warning(f"{folder} is damaged and not used:\n{listed}")
    raise RunFailure(f"{place}: all of its checkpoints are damaged.")


def _result_of_run(newest: Checkpoint) -> Checkpoint:
    if not newest.trainer.get("ends_run"):
        return newest
    step = result_step(recorded_config(newest), newest.step, int(newest.trainer["progress"]["best"]["step"]))
    if step == newest.step:
        return newest
    best = step_folder(newest.run, step)
    if problems := checkpoint_errors(best):
        log.warning(f"{best}, the best checkpoint, cannot be used: {'; '.join(problems)}. The newest one is taken.")
        return newest
    log.info(f"{newest.run} ended after step {newest.step}; its result is step {step}, with the best validation loss.")
    return Checkpoint(best)


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
            raise UserError(
                f"{checkpoint.folder}: its run had --trust_remote_code.\nIf you have read the Python code that comes "
                "with the base model, give it here too."
            )
        named, reads_weights = base_model or config.model.model_name, merge or not config.peft.use_peft
        if named == "demo":
            base = data.build_demo(data.cache_dir()).model_dir
        else:
            recorded = f"{checkpoint.folder / TRAINER_FILE} (--base_model overrides it): base model"
            base = models.local_folder(named, "--base_model" if base_model else recorded, weights=reads_weights)
        weights_then = trainer.get("contents", {}).get("model_name")
        if base_model is None and reads_weights and weights_then not in (None, models.fingerprint(base)):
            log.warning(f"{base} holds another model than when {checkpoint.folder} was written.")
        asked = dataclasses.replace(
            config.model, model_name=str(base), attn_implementation="auto", trust_remote_code=trust_remote_code
        )
        new = models.NewTokens(**trainer["new_tokens"]) if trainer.get("new_tokens") else None
        model, adapter = models.build_on_meta(models.load_model_config(base, trust_remote_code), asked, new), None
        if config.peft.use_peft:
            earlier = config.peft.from_peft_checkpoint
            if earlier and (problem := adapter_problem(earlier)):
                raise UserError(f"{checkpoint.folder}: its run continued an adapter. {earlier}: {problem}")
            adapter = models.inject_lora(model, config.peft, models.portable_name(named, base), new)
        if config.model.freeze_layers:
            models.freeze_first_layers(model, config.model.num_freeze_layers)
        _check_fits(checkpoint, model, base)
        named_tokenizer, folder = tokenizer_name or config.model.tokenizer_name, base
        if named_tokenizer is not None:
            folder = models.local_folder(named_tokenizer, "--tokenizer_name", weights=False)
        tokenizer = models.load_tokenizer(folder, trust_remote_code)
        tokenizer.chat_template = trainer["chat_template"]
        if tokenizer.chat_template and config.model.resize_embeddings:
            data.add_missing_tokens(tokenizer, data.own_template(tokenizer))
        return cls(checkpoint, config, base, named, tokenizer, new, model, adapter, trust_remote_code)

    def write_model(self, folder: Path, save_dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        """Write a fully tuned model.

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
        tensors = saved_tensors(self.model)
        stored = {name: source.tensors[key].dtype for name, key in keys.items()}
        dtypes = saved_dtypes(tensors, stored, save_dtype)
        groups = saved_layout(self.model, tensors)
        needed = sum(header.nbytes for group in groups for header in group_headers(group, dtypes).values())
        check_space(folder, needed)
        trained = self.checkpoint.weights()
        log.info(f"{len(trained.tensors)} of {len(tensors)} tensors are the checkpoint's; {size_text(needed)}")
        computed = _computed_buffers(self.model, source)

        def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
            if name in trained.tensors:
                return (block.to(dtype) for block in blocks(trained, name))
            if name in computed:
                return iter([computed[name].to(dtype)])
            return (block.to(dtype) for block in blocks(source, keys.get(name, name)))

        with written_aside(folder, NOTHING_LEFT) as aside:
            write_model_settings(aside, self.model.config, tensors, dtypes, self.tokenizer, self.base)
            write_weights(aside, groups, tensors, dtypes, max_shard_bytes, rows, enabled=True)
            write_model_card(aside, self.base_name, self.checkpoint.trainer)

    def write_adapter(self, folder: Path, save_dtype: torch.dtype | None) -> None:
        """Write a peft folder; arguments as of write_model, None for fp32 or what else was trained."""
        weights = self.checkpoint.weights()
        check_space(folder, sum(header.nbytes for header in weights.tensors.values()))
        with written_aside(folder, NOTHING_LEFT) as aside:
            self._write_peft_files(aside, save_dtype)
            write_model_card(aside, self.base_name, self.checkpoint.trainer)

    def write_merged(self, folder: Path, save_dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        """Write the base with the adapter merged into it, through a peft folder that is deleted afterwards. Arguments
        as of write_model."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".writing-{folder.name}-", dir=folder.parent) as aside:
                self._write_peft_files(Path(aside), save_dtype=None)
                merge_adapter(
                    Path(aside), self.base, folder, save_dtype, max_shard_bytes, self.trust_remote_code,
                    self.base_name, self.checkpoint.trainer,
                )  # fmt: skip
        except OSError as error:
            raise RunFailure(f"{folder}: the adapter could not be written beside it ({error.strerror}).") from error

    def _write_peft_files(self, folder: Path, save_dtype: torch.dtype | None) -> None:
        assert self.adapter is not None
        weights, names = self.checkpoint.weights(), {key: name for name, key in self.adapter.keys.items()}
        tensors = {
            key: torch.empty(tensor.shape, dtype=weights.tensors[names[key]].dtype, device="meta")
            for key, tensor in adapter_tensors(self.model, self.adapter).items()
        }

        def rows(key: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
            return (block.to(dtype) for block in blocks(weights, names[key]))

        write_adapter(folder, self.adapter, tensors, save_dtype, rows, self.tokenizer, enabled=True)


def recorded_config(checkpoint: Checkpoint) -> Config:
    """The settings of the run that wrote a checkpoint.

    Raises:
        UserError: another version of this program wrote it, with settings that this one does not know.
    """
    try:
        return Config(**checkpoint.trainer["config"])
    except (ValidationError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint.folder / TRAINER_FILE}: its settings are not those of this version of llama_ft ({error})."
        ) from error


def _check_fits(checkpoint: Checkpoint, model: PreTrainedModel, base: Path) -> None:
    """What the run trained must be what the same settings train of this base."""
    expected = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    found = {name: header.shape for name, header in checkpoint.weights().tensors.items()}
    wrong = sorted({name for name, _ in expected.items() ^ found.items()})
    if wrong:
        shapes = [f"{name}: {found.get(name, 'absent')}, expected {expected.get(name, 'none')}" for name in wrong[:5]]
        raise UserError(
            f"{checkpoint.folder}: does not fit {base}; {len(wrong)} tensors differ.\n"
            + "\n".join(shapes)
            + "\n--base_model names the model it was trained on."
        )


def _computed_buffers(model: PreTrainedModel, source: WeightSource) -> dict[str, torch.Tensor]:
    """Persistent buffers that the base does not hold, as transformers computes them."""
    absent = saved_tensors(model).keys() - dict(model.named_parameters()).keys() - source.tensors.keys()
    for prefix, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(".".join(filter(None, (prefix, name))) in absent for name in buffers):
            for name, buffer in buffers.items():
                module.register_buffer(
                    name, torch.empty_like(buffer, device="cpu"), name not in module._non_persistent_buffers_set
                )
    if absent:
        compute_buffers(model, model)
    return {name: buffer for name, buffer in model.named_buffers() if name in absent}
