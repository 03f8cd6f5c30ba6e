"""From what a run leaves behind, or any model's folder, to a model that answers: on the path that training takes.

run's directory   its model/, or while that is not there its newest sound checkpoint
checkpoint        the base model's weights with those that were trained in their place, or the adapter beside them
peft adapter      beside the base model it names
model             as it is, also one that bitsandbytes has quantized
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
from llama_ft.config.results import find_result, settings_beside
from llama_ft.config.wording import nearest_file
from llama_ft.errors import UserError
from llama_ft.models.lora import rows_trained
from llama_ft.models.shards import local_shard
from llama_ft.runtime import PRECISIONS, Precision, Runtime, advise_precision, log, use_fp32_products

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Opened:
    """A model that is ready to answer.

    Attributes:
        model: in eval mode on the job's device, sharded over its mesh with enable_fsdp, adapters beside its layers.
        tokenizer: with the chat template the model was trained with.
        folder: of the weights the model is made of, but for what was trained.
        about: what was loaded and how, in a line.
        place: what was tuned: folder of the model, adapter or checkpoint.
        quantization: none, 8bit or 4bit.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    about: str
    place: Path
    quantization: str


@dataclass(frozen=True)
class _Found:
    """What is to be loaded.

    Attributes:
        folder: of the base model.
        place: what of it all was tuned; the folder itself where nothing was.
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
        place: directory of a run, checkpoint, adapter, or a model's folder or hub name.
        base_model: where the model is that was tuned; None: where the run or the adapter says.
        tokenizer_name: where to take the tokenizer from; None: the result's own.
        quantization: none, 8bit or 4bit, or all of its settings; None: as the run had it.
        precision: what is computed in: bf16, fp16, fp32, one of training's, or auto: bf16 where the device computes
            that itself, else fp32.
        trust_remote_code: whether the model may bring code of its own.
        enable_fsdp: share the weights out over the ranks of the job's mesh; otherwise each rank holds all.
        job: the ranks, started with a mesh that shards if enable_fsdp.
        rows: that the embedding gets, where it has fewer: as a run with --resize_embeddings begins.
        tokenizer: of another model, in place of the one of a model or adapter, which may then have none.

    Raises:
        UserError: there is nothing to load, it does not fit together, or it is of a kind that is not read here.
        RunFailure: the checkpoint is damaged.
    """
    dtype, note = choose_dtype(precision, job)
    if (checked := find_result(Path(place).expanduser())) and checked[0] in ("checkpoint", "run"):
        sound = None
        with job.node_leader_first():  # every byte is read: longer than a collective may take
            if job.is_main:
                sound = checkpoint.find_sound(checked[1]).folder
        place = str(job.from_main(lambda: sound))
    with job.node_leader_first():
        found = _find(place, base_model, tokenizer_name, trust_remote_code, job, tokenizer)
        model_config = models.load_model_config(found.folder, trust_remote_code)
    stored = models.vocabulary_size(model_config)
    if rows is not None and stored is not None and found.new is None and stored < rows:
        found = replace(found, new=models.NewTokens(list(range(stored, rows)), stored, rows))
    asked = _quantization(quantization, found.run)
    kind = models.choose_quantization(asked, model_config, use_peft=True)  # nothing is trained here
    named = ModelConfig(model_name=str(found.folder), trust_remote_code=trust_remote_code)
    model = models.build_skeleton(model_config, named, found.new)
    if kind is not None:
        log.info(models.quantize_linears(model, kind))
    adapter = None
    if found.peft is not None:
        adapter = models.inject_lora(model, found.peft, str(found.folder), found.new)
    model.requires_grad_(False)
    models.use_head_loss(model)
    storage = Precision(dtype, dtype, dtype, dtype)
    models.set_storage_dtypes(model, storage)
    if enable_fsdp:
        models.shard(model, job.mesh, FSDPConfig(enable_fsdp=True), storage)
    models.materialize(
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
        _restore(found.trained, model, job)
    model.generation_config = _generation_config(found, model_config)
    about = ", ".join(_about(found, dtype, kind, enable_fsdp, job)) + note
    bits = "none" if kind is None else kind.scheme.name.partition(" ")[0]
    return Opened(model.eval(), found.tokenizer, found.folder, about, found.place, bits)


def choose_dtype(precision: str, job: Runtime) -> tuple[torch.dtype, str]:
    """What to compute in, and a note for people; "" for nothing. See open_model.

    Raises:
        UserError: bf16 on a GPU without it.
    """
    name = precision.partition("_")[0]  # training's bf16_mixed and bf16_pure compute in the same
    asked: Literal["bf16_pure", "fp16", "fp32"] = "bf16_pure"
    if name in ("fp16", "fp32"):
        asked = "fp16" if name == "fp16" else "fp32"
    try:
        chosen, note, widen = job.from_main(lambda: advise_precision(asked, name == "auto", job.device))
    except UserError as error:
        lacking = error.messages[0].partition(": ")[2].partition("\n")[0]
        raise UserError(f"--precision {precision}: {lacking}\nUse --precision fp16 or fp32.") from error
    if widen:
        use_fp32_products()
    return PRECISIONS[chosen].compute, f"; {note}" if note else ""


def _find(
    place: str,
    base_model: str | None,
    tokenizer_name: str | None,
    trust_remote_code: bool,
    job: Runtime,
    tokenizer: PreTrainedTokenizerBase | None,
) -> _Found:
    try:
        folder = models.local_folder(place, "MODEL", ask_hub=job.local_rank == 0)
    except UserError as error:
        raise UserError(f"{place}: no such folder.{nearest_file(Path(place))}\n{error.messages[0]}") from error
    result = find_result(folder)
    if result is None:
        raise UserError(f"{place}: no run, checkpoint, adapter or model is here.")
    kind, held = result
    if kind == "checkpoint":
        return _of_checkpoint(checkpoint.Checkpoint(held), base_model, tokenizer_name, trust_remote_code)
    run = settings_beside(kind, held)
    if kind == "model":
        tokenizer = tokenizer or _tokenizer(held, held, tokenizer_name, trust_remote_code)
        return _Found(held, held, tokenizer, run=run)
    named = base_model or base_model_of(str(held))
    where = "--base_model" if base_model else f"{held}/adapter_config.json (--base_model overrides it): base model"
    base = models.local_folder(named, where, ask_hub=job.local_rank == 0)
    lora = checkpoint.understood_adapter(held)
    new = sorted(rows_trained(lora))
    tokens = None
    if new:
        stored = models.vocabulary_size(models.load_model_config(base, trust_remote_code)) or 0
        tokens = models.NewTokens(new, stored, max(stored, new[-1] + 1))
    peft = PeftConfig(use_peft=True, from_peft_checkpoint=str(held))
    tokenizer = tokenizer or _tokenizer(held, base, tokenizer_name, trust_remote_code)
    return _Found(base, held, tokenizer, peft, tokens, run=run)


def _of_checkpoint(
    sound: checkpoint.Checkpoint, base_model: str | None, tokenizer_name: str | None, trust_remote_code: bool
) -> _Found:
    """Found and compared with its base as for an export that needs the base's weights."""
    export = checkpoint.Exporter.prepare(sound, base_model, tokenizer_name, trust_remote_code, merge=True)
    new = sound.trainer.get("new_tokens") and models.NewTokens(**sound.trainer["new_tokens"])
    peft = export.config.peft if export.adapter is not None else None
    return _Found(export.base, sound.folder, export.tokenizer, peft, new, sound, export.config)


def _tokenizer(result: Path, base: Path, override: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The one asked for, else the one saved with the result, else the base's."""
    if override is not None:
        folder = models.local_folder(override, "--tokenizer_name", weights=False)
        if (result / "chat_template.jinja").is_file():
            log.warning(f"--tokenizer_name {override}: chats are written as it says, not as {result} does.")
    else:
        folder = result if any((result / file).is_file() for file in TOKENIZER_FILES) else base
    return models.load_tokenizer(folder, trust_remote_code)


def _quantization(asked: str | QuantizationConfig | None, run: Config | None) -> QuantizationConfig:
    """What was asked for; with all its settings as in the run, if that had the same."""
    if isinstance(asked, QuantizationConfig):
        return asked
    if run is not None and asked in (None, run.quantization.mode):
        return run.quantization
    return QuantizationConfig(mode=asked or "none")  # type: ignore[arg-type]  # pydantic looks at it


def _restore(trained: checkpoint.Checkpoint, model: PreTrainedModel, job: Runtime) -> None:
    """Each rank its rows of the adapter; nothing of the model is marked as trained here."""
    weights, shards, parameters = trained.weights(), models.ShardGroup(job.mesh), dict(model.named_parameters())
    for name, header in weights.tensors.items():
        start, stop = shards.own_rows(header.shape[0])
        if stop > start:
            with torch.no_grad():
                local_shard(parameters[name]).copy_(weights.read_rows(name, start, stop))


def _generation_config(found: _Found, model_config: PretrainedConfig) -> GenerationConfig:
    """The model's own, stopping also where the chat template ends a turn."""
    folder = found.folder
    try:
        if (folder / "generation_config.json").is_file():
            config = GenerationConfig.from_pretrained(folder)
        else:
            config = GenerationConfig.from_model_config(model_config)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / 'generation_config.json'}: cannot be used ({error}).") from error
    config.eos_token_id = data.stop_token_ids(found.tokenizer, config.eos_token_id) or None
    return config


def _about(
    found: _Found, dtype: torch.dtype, kind: models.Quantization | None, enable_fsdp: bool, job: Runtime
) -> list[str]:
    what = str(found.place)
    if found.place != found.folder:
        what += f" (an adapter) on {found.folder}" if found.peft else f" on {found.folder}"
    parts = [what, next(name for name, it in DTYPES.items() if it == dtype)]
    if kind is not None:
        parts.append(kind.scheme.name)
    if job.world_size > 1:
        parts.append(f"{'sharded over' if enable_fsdp else 'whole on each of'} {job.world_size} ranks")
    return [*parts, str(job.device)]
