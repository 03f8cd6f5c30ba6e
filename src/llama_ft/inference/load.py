"""Load a model for generation from a run, a checkpoint, an adapter or a model directory. It is
built as in training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, data, models, training
from llama_ft.config import (
    Config,
    DataConfig,
    FSDPConfig,
    ModelConfig,
    PeftConfig,
    QuantizationConfig,
    TrainConfig,
    base_model_of,
)
from llama_ft.config.home import expanded
from llama_ft.config.paths import PROMPT_FORMAT, TOKENIZER_FILES, recorded_prompt_format
from llama_ft.data.media import Media
from llama_ft.data.read.media import KIND
from llama_ft.data.tokenize.prompt_tokens import PromptFormat
from llama_ft.errors import UserError, reason
from llama_ft.export import Exporter, find_valid, tokens_added, understood_adapter
from llama_ft.inference.flags import ModelFlags, find_result, settings_of_run
from llama_ft.models.quantization.layers import quantization_name
from llama_ft.phases import NULL_MONITOR
from llama_ft.runtime import PRECISIONS, Precision, Ranks, advise_precision

GENERATION_FILE = "generation_config.json"
# whose code Transformers has on the Hub
REMOTE_MODES = (
    GenerationMode.CONTRASTIVE_SEARCH,
    GenerationMode.DOLA_GENERATION,
    GenerationMode.CONSTRAINED_BEAM_SEARCH,
    GenerationMode.GROUP_BEAM_SEARCH,
)


class LoadedModel(NamedTuple):
    """A loaded model: in eval mode on the job's device, with its adapter, sharded if enable_fsdp;
    the tokenizer with the chat template of the fine-tuning; a line that says what was loaded;
    what reads media, if it was loaded with its towers; the form of prompts in the
    fine-tuning; and the tokens that end generation."""

    built: models.BuiltModel
    tokenizer: PreTrainedTokenizerBase
    about: str
    media: Media | None = None
    prompt_format: PromptFormat = "chat"
    stop_ids: Sequence[int] = ()

    @property
    def model(self) -> PreTrainedModel:
        return self.built.model


OpenMedia = Callable[[models.ModelRequest, PreTrainedTokenizerBase, Config | None], Media | None]


class FineTuned(NamedTuple):
    """A fine-tuned model whose base model is loaded: the settings of its run, if they are known, and
    its tokenizer, which replaces the base model's: that one may be missing."""

    run: Config | None
    tokenizer: PreTrainedTokenizerBase


@dataclass
class _ModelFiles:
    """What to load, and from where."""

    base: Path
    place: Path  # of the trained weights, or else of the base model
    tokenizer: PreTrainedTokenizerBase
    run: Config | None
    peft: PeftConfig | None = None
    new: models.NewTokens | None = None  # tokens that the base model lacks
    trained: checkpoint.Checkpoint | None = None
    has_score: bool = False  # the trained weights have a head for scores

    @property
    def prompt_format(self) -> PromptFormat:
        """How prompts were written in the fine-tuning."""
        recorded = recorded_prompt_format(self.place)
        if self.trained is not None:
            recorded = self.trained.trainer.get(PROMPT_FORMAT, "chat")
        return "text" if recorded == "text" else "chat"


def open_model(
    place: str,
    flags: ModelFlags,
    ranks: Ranks,
    build_model: models.BuildModel,
    base_of: FineTuned | None = None,
    open_media: OpenMedia | None = None,
) -> LoadedModel:
    """Load what `place` names. All ranks must call it.

    Args:
        place: a run's directory (its model/, or else its newest valid checkpoint), a checkpoint, an
            adapter, a model's directory or a Hub name. A model may be quantized with bitsandbytes.
        flags: where the parts are, quantization, precision and sharding.
        ranks: the ranks; its mesh shards if flags.enable_fsdp.
        build_model: the recipe's function.
        base_of: `place` is the base model of this model: load it in the state before the first step.
        open_media: returns what reads media, such as the function `open_media`. If there is none,
            towers are not loaded.

    Raises:
        UserError: there is nothing to load, the parts do not fit, or the kind of model is not
            supported.
        RunFailure: the checkpoint is corrupted.
    """
    # both bf16_* compute in bf16
    precision: Any = flags.precision if flags.precision in ("fp16", "fp32") else "bf16_pure"
    is_free = flags.precision in (None, "auto")
    chosen, note = ranks.broadcast_from_rank0(
        lambda: advise_precision(precision, is_free, ranks.device)
    )
    kind, held = find_result(expanded(place)) or ("", Path())
    if kind in ("checkpoint", "run"):
        # Rank 0 alone compares checksums, which reads the whole checkpoint.
        place = str(ranks.broadcast_from_rank0(lambda: find_valid(held).folder))
    # The first process of each node downloads the model; the others find it in the Hub's cache.
    with ranks.local_main_process_first():
        files = _find(place, flags, ranks, build_model, base_of)
        request = _request(files, flags, PRECISIONS[chosen].compute)
        media = open_media and open_media(request, files.tokenizer, files.run)
    request = replace(request, with_towers=media is not None)
    built = build_model(request, ranks, NULL_MONITOR)
    model = built.model
    # Without an adapter, build_model has loaded the trained weights in place of the base's.
    if files.trained is not None and built.adapter is not None:
        checkpoint.restore_weights(files.trained, model)
    model.requires_grad_(False)
    _set_special_tokens(built, files)
    where = f"{files.place} (with {files.base})" if files.place != files.base else str(files.base)
    sharding = f"sharded across {ranks.shard.size} ranks" if flags.enable_fsdp else ""
    bits = quantization_name(model)
    compute = chosen[:4]  # "bf16" of bf16_pure
    facts = (where, compute, bits, sharding, str(ranks.device), note)
    about = ", ".join(fact for fact in facts if fact)
    model.eval()
    stop_ids = models.stop_ids(files.base, request.model_config)
    return LoadedModel(built, files.tokenizer, about, media, files.prompt_format, stop_ids)


def _set_special_tokens(built: models.BuiltModel, files: _ModelFiles) -> None:
    """Set the pad token of a model with a head for scores; of another one how it generates, and the
    tokens that end generation."""
    model = built.model
    if files.has_score or (built.has_score and model.config.pad_token_id is None):
        vocabulary = models.vocabulary_size(model.config)
        training.set_pad_token(model.config, files.tokenizer, vocabulary)
    if not built.has_score:
        if (files.base / GENERATION_FILE).is_file():
            model.generation_config = read_generation_config(files.base)
        # the base model's end of a text, and the chat template's end of a message
        ends = data.stop_token_ids(files.tokenizer, model.generation_config.eos_token_id)
        model.generation_config.eos_token_id = ends or None


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return how a model generates. Raises UserError if its file cannot be used."""
    try:
        config = GenerationConfig.from_pretrained(folder)
        mode = config.get_generation_mode()
        if mode in REMOTE_MODES:
            raise ValueError(f"{mode.value} needs code from the Hub, which is not run")
        ends = config.eos_token_id
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and not isinstance(end, int):
                raise ValueError(f"eos_token_id is {ends}; expected a number or a list")
    # Transformers raises many classes here, with one meaning for the user
    except Exception as error:
        raise UserError(f"{folder / GENERATION_FILE}: cannot be used ({reason(error)}).") from error
    return config


def open_media(
    request: models.ModelRequest,
    tokenizer: PreTrainedTokenizerBase,
    run: Config | None,
    max_pixels: int | None = None,
) -> Media:
    """Load what reads the media of prompts. The tokenizer gets the processor's chat template, if it
    has none.

    Args:
        request: the model.
        tokenizer: of the answers.
        run: settings of the fine-tuning, if they are known.
        max_pixels: of an image; None: as in the run.

    Raises:
        UserError: the model takes text only, or its processor cannot be used.
    """
    problem = models.why_text_only(request.model_config)
    if problem:
        raise UserError(f"{request.folder}: the prompt has {KIND}, but {problem}.")
    if max_pixels is None and run is not None:
        max_pixels = run.data.max_pixels
    trust = request.config.model.trust_remote_code
    model = data.MediaModel(request.folder, request.model_config, tokenizer, trust)
    config = DataConfig(max_pixels=max_pixels)
    media = data.media_reader().load(model, config, data.cache_dir())
    media.check()
    return media


def _find(
    place: str,
    flags: ModelFlags,
    ranks: Ranks,
    build_model: models.BuildModel,
    base_of: FineTuned | None,
) -> _ModelFiles:
    trust = flags.trust_remote_code
    run = base_of.run if base_of is not None else None
    tokenizer = base_of.tokenizer if base_of is not None else None
    ask_hub = ranks.local_rank == 0
    if place == "demo":
        local = data.build_demo(data.cache_dir()).model_dir
    else:
        local = models.local_folder(place, "MODEL", ask_hub)
    kind, held = find_result(local) or ("model", local)
    if kind == "checkpoint":
        return _find_checkpoint(held, flags, build_model)
    base = held
    if kind == "model" and run is None:
        models.check_no_adapter(held, "MODEL")
    new = None
    peft = None
    has_score = False
    if kind == "adapter":
        where = f"{held}/adapter_config.json (--base_model overrides it): base model"
        named = flags.base_model or base_model_of(str(held))
        base = models.local_folder(named, "--base_model" if flags.base_model else where, ask_hub)
        settings = understood_adapter(held)
        new = tokens_added(settings, models.load_model_config(base, trust))
        has_score = settings.task_type == "SEQ_CLS"
        peft = PeftConfig(use_peft=True, from_peft_checkpoint=str(held))
    if tokenizer is None:
        has_own = any((held / file).is_file() for file in TOKENIZER_FILES)
        folder = held if has_own else base
        if flags.tokenizer_name:
            folder = models.local_folder(flags.tokenizer_name, "--tokenizer_name", weights=False)
        tokenizer = models.load_tokenizer(folder, trust)
    if run is not None:
        base_config = models.load_model_config(base, trust)
        new = models.find_new_tokens(tokenizer, base, base_config, run.model)
    run = run or settings_of_run(kind, held)
    return _ModelFiles(base, held, tokenizer, run, peft, new, has_score=has_score)


def _find_checkpoint(
    folder: Path, flags: ModelFlags, build_model: models.BuildModel
) -> _ModelFiles:
    """Return the parts of a checkpoint. They are found, and compared with the base model, as in an
    export."""
    valid = checkpoint.Checkpoint(folder)
    trust = flags.trust_remote_code
    export = Exporter.prepare(
        valid, build_model, flags.base_model, flags.tokenizer_name, trust, merge=True
    )
    return _ModelFiles(
        base=export.base,
        place=valid.folder,
        tokenizer=export.tokenizer,
        run=export.config,
        peft=export.config.peft if export.adapter is not None else None,
        new=export.new,
        trained=valid,
        has_score=export.config.preference.entry.has_score,
    )


def _request(files: _ModelFiles, flags: ModelFlags, dtype: torch.dtype) -> models.ModelRequest:
    """Return what `build_model` builds to answer prompts: nothing is trained or packed, and all
    weights are stored in the dtype of the computation."""
    model_config = models.load_model_config(files.base, flags.trust_remote_code)
    if files.has_score:
        models.choose_head(model_config, has_score=True)
    quantization = QuantizationConfig(mode=flags.quantization or "none")
    if files.run is not None and flags.quantization in (None, files.run.quantization.mode):
        quantization = files.run.quantization  # including all its other settings
    train = TrainConfig(activation_checkpointing="off", router_aux_loss_coef=0, seed=0)
    config = Config(
        model=ModelConfig(model_name=str(files.base), trust_remote_code=flags.trust_remote_code),
        data=DataConfig(batching_strategy="padding"),
        train=train,
        fsdp=FSDPConfig(enable_fsdp=flags.enable_fsdp),
        peft=files.peft or PeftConfig(),
        quantization=quantization,
    )
    return models.ModelRequest(
        config,
        files.base,
        model_config,
        files.new,
        purpose="read",
        is_sharded=flags.enable_fsdp,
        trained=files.trained.weights() if files.trained is not None else None,
        storage=Precision(dtype, dtype, dtype, dtype),
        # the dtype that training has quantized from, so that the quantized weights are the same
        quantized_from=PRECISIONS[files.run.train.precision].frozen if files.run else dtype,
    )
