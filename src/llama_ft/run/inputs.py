"""What a run reads and plans before its model is loaded: model, tokenizer, samples and batches."""

import dataclasses
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llama_ft import data, models, training
from llama_ft.config import Config, as_fraction
from llama_ft.config.paths import PROMPT_FORMAT, unusual_output_dir
from llama_ft.errors import UserError
from llama_ft.export import check_export
from llama_ft.run.evaluation import Evaluation
from llama_ft.run.setup import Setup, check_not_beyond, check_same_run
from llama_ft.runtime import Ranks, log


@dataclass(frozen=True)
class BaseModel:
    """The model to fine-tune, before it is loaded."""

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, checked, and what it plans: see `resolve_inputs`.

    Attributes:
        config: the settings. Each auto is replaced by a choice.
        request: the model to build.
        tokenizer: of the run.
        dataset: the tokenized data.
        batches: the plan of all steps.
        description: for trainer.json; a resumed run must have the same.
        evaluation: of the model: losses and answers.
        objective: what is trained.
    """

    config: Config
    request: models.ModelRequest
    tokenizer: PreTrainedTokenizerBase
    dataset: data.TokenizedData
    batches: data.TrainingBatches
    description: dict[str, Any]
    evaluation: Evaluation
    objective: training.Objective


def find_model(config: Config, ranks: Ranks) -> BaseModel:
    """Return the model's directory, config and tokenizer. Only one rank per node asks the Hub."""
    settings = config.model
    ask_hub = ranks.local_rank == 0
    is_demo = settings.model_name == "demo"
    if is_demo or config.data.dataset == "demo":
        demo = data.build_demo(data.cache_dir())
        if is_demo:
            log.info(demo.about_model)
        if config.data.dataset == "demo":
            log.info(demo.about_data)
    if is_demo:
        folder = demo.model_dir
    else:
        folder = models.local_folder(settings.model_name, "--model_name", ask_hub)
    models.check_no_adapter(folder, "--model_name", config.peft.from_peft_checkpoint)
    model_config = models.load_model_config(folder, settings.trust_remote_code)
    models.choose_head(model_config, config.preference.entry.has_score)
    # rejects a quantized model that cannot be fine-tuned, and corrupted files, before samples are
    # tokenized
    models.choose_quantization(config.quantization, deepcopy(model_config), config.peft.use_peft)
    keeps_stored = config.quantization.mode == "as_stored"
    if ranks.is_main and (stored := models.describe_published(folder, model_config, keeps_stored)):
        log.info(stored)
    tokens = folder
    if settings.tokenizer_name is not None:
        tokens = models.local_folder(
            settings.tokenizer_name, "--tokenizer_name", ask_hub, weights=False
        )
    tokenizer = models.load_tokenizer(tokens, settings.trust_remote_code)
    return BaseModel(folder, model_config, tokenizer)


def tokenize_samples(
    config: Config, base: BaseModel, objective: training.Objective, ranks: Ranks
) -> data.TokenizedData:
    """Return the samples as tokens and loss masks, from the cache if they are there."""
    vocabulary = models.vocabulary_size(base.config)
    media_model = None  # only text is read
    no_media = models.why_text_only(base.config, config.preference.objective)
    if not no_media:
        trust = config.model.trust_remote_code
        media_model = data.MediaModel(base.folder, base.config, base.tokenizer, trust)
    request = data.DataRequest(
        context_length=models.resolve_context_length(config.data.context_length, base.config),
        want_validation=config.train.run_validation,
        vocabulary_size=None if config.model.resize_embeddings else vocabulary,
        add_tokens=config.model.resize_embeddings,
        examples=objective.examples,
        media_model=media_model,
        no_media=no_media,
        stop_ids=models.stop_ids(base.folder, base.config),
    )
    return data.prepare(
        config.data,
        base.tokenizer,
        request,
        cache=data.cache_dir(),
        verify_cache=ranks.local_rank == 0,
    )


def resolve_inputs(
    setup: Setup, base: BaseModel, dataset: data.TokenizedData, objective: training.Objective
) -> RunInputs:
    """Check that settings, model and samples fit together and are those of the resumed run, plan
    which samples this rank sees at which step, and start to plan the memory in another process. All
    ranks call it together. It waits for the memory plan only if that has to choose
    activation_checkpointing.

    Raises:
        UserError: something does not fit.
    """
    ranks = setup.ranks
    config = setup.choose_kernels(base.config)
    new_tokens = models.find_new_tokens(base.tokenizer, base.folder, base.config, config.model)
    vocabulary = new_tokens.rows if new_tokens else models.vocabulary_size(base.config)
    log.info("\n".join(dataset.summary))
    for warning in (*dataset.warnings, *dataset.leaks):
        log.warning(warning)
    _check_media(config, dataset)
    prompts = _sample_prompts(config, base.tokenizer, vocabulary, dataset)
    if ranks.is_main:
        check_export(base.config, base.tokenizer, base.folder)
    description = _describe_inputs(setup, base, new_tokens, dataset)
    check_same_run(setup.resumed, config, description, setup.origins)
    scores = training.open_scores(config.train, dataset.validations, base.tokenizer)
    objective.prepare_model(base.config, base.tokenizer, vocabulary)
    pad = data.pad_token_id(base.tokenizer, vocabulary)
    context_length = models.resolve_context_length(config.data.context_length, base.config)
    layout = data.training_layout(config, context_length, pad, ranks, dataset.media)
    batches = data.plan_training(config, dataset, layout, setup.global_batch, vocabulary, ranks)
    _check_batches(setup, config, batches, base.tokenizer)
    config = setup.preflight.start(config, base.folder, new_tokens, dataset, batches, ranks)
    return RunInputs(
        config,
        models.ModelRequest(
            config, base.folder, base.config, new_tokens, with_towers=dataset.media is not None
        ),
        base.tokenizer,
        dataset,
        batches,
        description,
        Evaluation(base.tokenizer, prompts, scores),
        objective,
    )


def pass_inputs(setup: Setup, inputs: RunInputs) -> training.PassInputs:
    """Return what the first pass of an objective needs."""
    return training.PassInputs(
        inputs.request,
        inputs.tokenizer,
        inputs.dataset,
        inputs.batches.layout,
        setup.ranks,
        setup.resumed_folders,
        setup.unfinished,
    )


def _check_media(config: Config, dataset: data.TokenizedData) -> None:
    if dataset.media is not None:
        dataset.media.check_settings(config)
    elif config.train.sample_images:
        raise UserError("--sample_images: no sample has images. Leave it out.")
    elif models.trains_towers(config.model):
        raise UserError(
            "--train_vision and --freeze_LLM_only: no sample has images. Leave them out."
        )


def _sample_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int | None,
    dataset: data.TokenizedData,
) -> list[training.SamplePrompt]:
    """Return the sample prompts. Raises UserError if one cannot be answered."""
    report = dataset.report
    prompts = training.sample_prompts(
        config.train, report.chat_sample, report.chat_tools, dataset.prompt_format
    )
    training.check_sample_prompts(prompts, tokenizer, vocabulary, dataset.media)
    if tokenizer.chat_template and any(isinstance(one.prompt, str) for one in prompts):
        log.info(f"sample prompts: {data.AS_TEXT}")
    return prompts


def _describe_inputs(
    setup: Setup,
    base: BaseModel,
    new_tokens: models.NewTokens | None,
    dataset: data.TokenizedData,
) -> dict[str, Any]:
    """Return what a resumed run must have, too, apart from the settings."""
    settings = setup.config.data
    return {
        "batches": data.BATCHES_VERSION[settings.batching_strategy],
        "split": data.SPLIT_VERSION if as_fraction(settings.validation) else None,
        "global_batch": setup.global_batch,
        "contents": {"model_name": models.fingerprint(base.folder), **dataset.fingerprints()},
        "chat_template": base.tokenizer.chat_template,
        PROMPT_FORMAT: dataset.prompt_format,
        "new_tokens": new_tokens and dataclasses.asdict(new_tokens),
        "leaks": list(dataset.leaks),
    }


def _check_batches(
    setup: Setup,
    config: Config,
    batches: data.TrainingBatches,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Log the number of steps, advice and samples."""
    log.info(batches.describe())
    check_not_beyond(setup.resumed, batches)
    setting = config.train.warmup_steps
    warmup = training.warmup_steps(config.train, batches.total_steps)
    if setting > warmup:
        log.warning(
            f"warmup_steps {setting} is too long for {batches.total_steps} steps; using {warmup}."
        )
    names_dataset = "data.dataset" in setup.origins
    for advice in training.advice(config, names_dataset, setup.global_batch, batches.size):
        log.warning(advice)
    output_dir = config.checkpoint.output_dir
    if setup.ranks.is_main and output_dir is not None:
        unusual = unusual_output_dir(output_dir, config.model.model_name)
        if unusual:
            log.warning(unusual)
    if config.data.show_samples:
        are_prompts = config.preference.entry.make_steps is not None
        count = config.data.show_samples
        data.show_samples(batches.first_samples(), tokenizer, count, are_prompts)
