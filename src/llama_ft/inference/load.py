"""From what a run leaves behind, or any model's directory, to a model that answers: built as in training.

run's directory   its model/, or without one its newest valid checkpoint
checkpoint        the base model's weights with the trained ones in their place, or with the adapter
peft adapter      with the base model it names
model             as it is, also if bitsandbytes has quantized it
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, data, models
from llama_ft.config import Config, FSDPConfig, ModelConfig, PeftConfig, QuantizationConfig, base_model_of
from llama_ft.config.paths import TOKENIZER_FILES
from llama_ft.errors import UserError
from llama_ft.inference.results import find_result, settings_beside
from llama_ft.runtime import PRECISIONS, Precision, Runtime, advise_precision, log

PrecisionName = Literal["bf16_pure", "fp16", "fp32"]


@dataclass(frozen=True)
class Opened:
    """A model that is ready to answer.

    Attributes:
        model: in eval mode on the job's device, sharded over its mesh with enable_fsdp, with its adapter.
        tokenizer: with the chat template the model was trained with.
        folder: of the base model.
        about: what was loaded and how, in a line.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    about: str


@dataclass(frozen=True)
class _Found:
    """What is to be loaded.

    Attributes:
        folder: of the base model.
        place: of what was trained; the folder itself if nothing was.
        tokenizer: of the result.
        peft: settings of the adapter, if there is one.
        new: tokens whose rows the base lacks.
        trained: the checkpoint that holds the trained weights, if they are taken from one.
        run: settings of the run it comes from, as far as they are known.
    """

    folder: Path
    place: Path
    tokenizer: PreTrainedTokenizerBase
    peft: PeftConfig | None = None
    new: models.NewTokens | None = None
    trained: checkpoint.Checkpoint | None = None
    run: Config | None = None


def open_model(
    place: str,
    *,
    base_model: str | None,
    tokenizer_name: str | None,
    quantization: str | QuantizationConfig | None,
    precision: str,
    trust_remote_code: bool,
    enable_fsdp: bool,
    job: Runtime,
    rows: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Opened:
    """Load what `place` names; all ranks call it together.

    Args:
        place: directory of a run, checkpoint, adapter, or a model's directory or Hub name.
        base_model: where the base model is; None: where the run or the adapter says.
        tokenizer_name: where to take the tokenizer from; None: the result's own.
        quantization: none, 8bit or 4bit, or all of its settings; None: as the run had it.
        precision: what is computed in: bf16, fp16, fp32, one of training's, or auto: bf16 if the device computes in
            bf16 itself, else fp32.
        trust_remote_code: whether the model may bring code of its own.
        enable_fsdp: shard the weights across the ranks of the job's mesh; otherwise each rank holds all.
        job: the ranks, started with a mesh that shards if enable_fsdp.
        rows: of the embedding, if it has fewer: as a run with --resize_embeddings begins.
        tokenizer: of another model, in place of the one of a model or adapter, which may then have none.

    Raises:
        UserError: there is nothing to load, it does not fit together, or it is of a kind that is not read here.
        RunFailure: the checkpoint is corrupted.
    """
    name = precision.partition("_")[0]  # training's bf16_mixed and bf16_pure compute in the same
    asked: PrecisionName = "fp16" if name == "fp16" else "fp32" if name == "fp32" else "bf16_pure"
    chosen, note = job.broadcast_from_rank0(lambda: advise_precision(asked, name == "auto", job.device))
    dtype = PRECISIONS[chosen].compute
    if (result := find_result(Path(place).expanduser())) and result[0] in ("checkpoint", "run"):
        sound = None
        with job.local_main_process_first():  # every byte is read: longer than a collective may take
            if job.is_main:
                sound = checkpoint.find_valid(result[1]).folder
        place = str(job.broadcast_from_rank0(lambda: sound))
    with job.local_main_process_first():
        found = _find(place, base_model, tokenizer_name, trust_remote_code, job, tokenizer)
        model_config = models.load_model_config(found.folder, trust_remote_code)
    stored = models.vocabulary_size(model_config)
    if rows is not None and stored is not None and found.new is None and stored < rows:
        found = replace(found, new=models.NewTokens(list(range(stored, rows)), stored, rows))
    wanted = _quantization(quantization, found.run)
    kind = models.choose_quantization(wanted, model_config, use_peft=True)  # nothing is trained here
    named = ModelConfig(model_name=str(found.folder), trust_remote_code=trust_remote_code)
    model = models.build_on_meta(model_config, named, found.new)
    if kind is not None:
        log.info(models.quantize_linears(model, kind))
    adapter = None
    if found.peft is not None:
        adapter = models.inject_lora(model, found.peft, str(found.folder), found.new)
    models.use_chunked_loss(model)
    storage = Precision(dtype, dtype, dtype, dtype)
    models.set_storage_dtypes(model, storage)
    if enable_fsdp:
        models.apply_fsdp(model, job.mesh, FSDPConfig(enable_fsdp=True), storage)
    models.load_weights(
        model,
        found.folder,
        models.ShardGroup(job.mesh),
        job.device,
        job.storage_device,
        scatter=False,
        adapter=adapter,
        peft=found.peft if found.peft and found.trained is None else PeftConfig(),
        seed=0,
        frozen_dtype=PRECISIONS[found.run.train.precision].frozen if found.run else dtype,
        tuned=found.trained.weights() if found.trained and adapter is None else None,
    )
    if found.trained is not None and adapter is not None:
        checkpoint.restore_weights(found.trained, model)
    model.requires_grad_(False)
    model.generation_config = _generation_config(found, model_config)
    parts = [f"{found.place} (with {found.folder})" if found.place != found.folder else str(found.folder)]
    parts += [{torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")]
    parts += [kind.scheme.name] if kind is not None else []
    if job.world_size > 1:
        parts.append(f"{'sharded across' if enable_fsdp else 'whole on each of'} {job.world_size} ranks")
    about = ", ".join([*parts, str(job.device)]) + (f"; {note}" if note else "")
    return Opened(model.eval(), found.tokenizer, found.folder, about)


def _find(
    place: str,
    base_model: str | None,
    tokenizer_name: str | None,
    trust_remote_code: bool,
    job: Runtime,
    tokenizer: PreTrainedTokenizerBase | None,
) -> _Found:
    result = find_result(models.local_folder(place, "MODEL", ask_hub=job.local_rank == 0))
    if result is None:
        raise UserError(f"{place}: no run, checkpoint, adapter or model is here.")
    kind, held = result
    if kind == "checkpoint":  # found and compared with its base as for an export
        sound = checkpoint.Checkpoint(held)
        export = checkpoint.Exporter.prepare(sound, base_model, tokenizer_name, trust_remote_code, merge=True)
        peft = export.config.peft if export.adapter is not None else None
        return _Found(export.base, sound.folder, export.tokenizer, peft, export.new, sound, export.config)
    run = settings_beside(kind, held)
    if kind == "model":
        tokenizer = tokenizer or _tokenizer(held, held, tokenizer_name, trust_remote_code)
        return _Found(held, held, tokenizer, run=run)
    where = "--base_model" if base_model else f"{held}/adapter_config.json (--base_model overrides it): base model"
    base = models.local_folder(base_model or base_model_of(str(held)), where, ask_hub=job.local_rank == 0)
    lora = checkpoint.understood_adapter(held)
    new = checkpoint.tokens_added(lora, models.load_model_config(base, trust_remote_code))
    tokenizer = tokenizer or _tokenizer(held, base, tokenizer_name, trust_remote_code)
    return _Found(base, held, tokenizer, PeftConfig(use_peft=True, from_peft_checkpoint=str(held)), new, run=run)


def _tokenizer(result: Path, base: Path, override: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer asked for, else the one saved with the result, else the base's."""
    if override is not None:
        folder = models.local_folder(override, "--tokenizer_name", weights=False)
        if (result / "chat_template.jinja").is_file():
            log.warning(f"--tokenizer_name {override}: its chat template is used, and not that of {result}.")
    else:
        folder = result if any((result / file).is_file() for file in TOKENIZER_FILES) else base
    return models.load_tokenizer(folder, trust_remote_code)


def _quantization(asked: str | QuantizationConfig | None, run: Config | None) -> QuantizationConfig:
    """Return what was asked for; with all its settings as in the run, if that had the same."""
    if isinstance(asked, QuantizationConfig):
        return asked
    if run is not None and asked in (None, run.quantization.mode):
        return run.quantization
    return QuantizationConfig(mode=asked or "none")  # type: ignore[arg-type]  # pydantic checks it


def _generation_config(found: _Found, model_config: PretrainedConfig) -> GenerationConfig:
    """Return the model's own, stopping also at the end of a message of the chat template."""
    file = found.folder / "generation_config.json"
    try:
        own = GenerationConfig.from_pretrained(found.folder) if file.is_file() else None
        config = own or GenerationConfig.from_model_config(model_config)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: cannot be used ({error}).") from error
    config.eos_token_id = data.stop_token_ids(found.tokenizer, config.eos_token_id) or None
    return config
