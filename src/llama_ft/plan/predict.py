"""Predict the memory of a run: build, shard and load its model and run its step, all on fake
tensors."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, models, training
from llama_ft.config import Config
from llama_ft.data import IGNORED, Batch, StepBatches
from llama_ft.data.batches.prefetch import STEPS_AHEAD
from llama_ft.data.media import media_reader
from llama_ft.models.base.attention_kernels import AMPERE, T4
from llama_ft.models.computing.pieces import sampled_pieces
from llama_ft.observe.flops import flop_formula
from llama_ft.phases import MemoryCategory, Phase
from llama_ft.plan.fake.answers import generate_twice, plan_answers
from llama_ft.plan.fake.attention_workspace import sdpa_of_a_gpu
from llama_ft.plan.fake.fake_checkpoint import layers_are_alike, loader_of_headers, shared_headers
from llama_ft.plan.fake.patches import planned_models
from llama_ft.plan.fake.saved import pinned_excess_of, result_bytes_of, saves_copies
from llama_ft.plan.fake.tracker import MemoryTracker, states_of
from llama_ft.plan.free_memory import CUDA_CONTEXT_BYTES, NCCL_BYTES
from llama_ft.plan.types import SLACK, Peak, Plan, PlannedMedia, PlanRequest, Recipe
from llama_ft.runtime import Ranks, Target, computing_on, log_off
from llama_ft.runtime.process_group import mesh_over, resolve_degree
from llama_ft.runtime.sequence import share_sequences
from llama_ft.training.objectives.first_pass import FirstPass

QUICK_LAYERS = (3, 5)
PLANNED_MICRO_BATCHES = 2  # further ones take the same memory as the second
OFFLOADED: tuple[MemoryCategory, ...] = (
    "sharded parameters",
    "quantized parts",
    "optimizer state",
    "gradients",
)


def predict(request: PlanRequest, recipe: Recipe, quick: bool = False) -> Plan:
    """Predict the memory of rank 0.

    Args:
        request: the run. This process must not have a process group yet.
        recipe: its functions run on fake tensors.
        quick: extrapolate from models with 3 and 5 layers, if all layers are alike.

    Raises:
        UserError: the run itself would raise it, too.
    """
    [plan] = predict_lengths(request, recipe, [request.pack_length], quick)
    return plan


def predict_lengths(
    request: PlanRequest, recipe: Recipe, lengths: Sequence[int | None], quick: bool
) -> list[Plan]:
    """Predict the memory of rank 0 for packed sequences of several lengths, None: as the settings say.
    The model is built once, which takes most of the time. For the rest see `predict`."""
    request = dataclasses.replace(request, media=_media_of(request))
    with log_off():  # the run itself logs these messages
        plan_with = partial(_plan_with, request, recipe, lengths)
        plans = _plan_quickly(plan_with, request, quick)
        first_pass = recipe.build_objective(request.config).first_pass(request.config)
        if first_pass is None:
            return plans
        with_pass = []
        for length, plan in zip(lengths, plans, strict=True):
            if first_pass.needs_other_model():
                one = dataclasses.replace(request, pack_length=length)
                plan = _with_pass(plan, first_pass, one, recipe.build_model, quick)
            plan = dataclasses.replace(
                plan,
                teacher_bytes_per_token=first_pass.bytes_per_token(),
                teacher_bytes=first_pass.bytes_of(*request.samples) if request.samples else 0,
            )
            with_pass.append(plan)
        return with_pass


def _media_of(request: PlanRequest) -> PlannedMedia | None:
    """Return what examples have in addition to text; at least some if towers are trained."""
    if request.media is None and models.trains_towers(request.config.model):
        planned: PlannedMedia = media_reader().planned()
        return planned
    return request.media


def _plan_quickly(
    plan_with: Callable[[int | None], list[Plan]], request: PlanRequest, quick: bool
) -> list[Plan]:
    """Plan all layers; if `quick` and all are alike, extrapolate from a few. `plan_with`: returns the
    plans of several lengths with that many layers, None: all."""
    trust_code = request.config.model.trust_remote_code
    model_config = models.load_model_config(request.folder, trust_code)
    layers = getattr(model_config.get_text_config(), "num_hidden_layers", 0)
    is_deep = layers > QUICK_LAYERS[1]
    if quick and is_deep and layers_are_alike(request):
        few, more = (plan_with(count) for count in QUICK_LAYERS)
        return [_extrapolate(*pair, layers) for pair in zip(few, more, strict=True)]
    return plan_with(None)


def _with_pass(
    plan: Plan,
    first_pass: FirstPass,
    request: PlanRequest,
    build_model: models.BuildModel,
    quick: bool,
) -> Plan:
    """Return the plan with the peaks of a pass where they are higher."""
    config = first_pass.config
    folder = models.local_folder(config.model.model_name, first_pass.flag, weights=False)
    pass_request = dataclasses.replace(request, config=config, folder=folder, new_tokens=None)
    plan_with = partial(_pass_plan, pass_request, build_model, plan, first_pass)
    [planned] = _plan_quickly(plan_with, pass_request, quick)
    peaks = {peak.phase: peak for peak in plan.peaks}
    for peak in planned.peaks:
        before = peaks.get(peak.phase)
        if before is None or peak.bytes > before.bytes:
            peaks[peak.phase] = peak
    return dataclasses.replace(
        plan,
        peaks=list(peaks.values()),
        reserved_bytes=max(plan.reserved_bytes, planned.reserved_bytes),
        host_load_bytes=max(plan.host_load_bytes, planned.host_load_bytes),
    )


def _pass_plan(
    request: PlanRequest,
    build_model: models.BuildModel,
    of_run: Plan,
    first_pass: FirstPass,
    layers: int | None,
) -> list[Plan]:
    """Plan a pass of a model over the samples: frozen, without gradients."""
    config = _plannable(request.config)
    request = dataclasses.replace(request, config=config)
    model_config, headers = shared_headers(request, layers)
    context_length = _context_length(request, model_config)
    batch = _full_batch(request, config.train.batch_size_training, context_length)
    tracker = MemoryTracker(request.device)
    with _planning(request, tracker) as ranks:
        models.choose_head(model_config, config.preference.entry.has_score)
        model_request = models.ModelRequest(
            config,
            request.folder,
            model_config,
            purpose="reference",
            open_loader=loader_of_headers(headers),
        )
        built = build_model(model_request, ranks, tracker)
        tracker.watch(built)
        tracker.enter("evaluation")
        first_pass.compute(built, batch, ranks)
    peaks = [tracker.peaks["load"], tracker.peaks["evaluation"]]
    largest = max(peak.bytes for peak in peaks)
    is_cuda = request.device == "cuda"
    plan = dataclasses.replace(
        of_run,
        peaks=peaks,
        reserved_bytes=round(SLACK * largest) if is_cuda else largest,
        host_load_bytes=peaks[0].holders["temporaries"] if is_cuda else peaks[0].bytes,
    )
    return [plan]


def _plan_with(
    request: PlanRequest, recipe: Recipe, lengths: Sequence[int | None], layers: int | None
) -> list[Plan]:
    """Run the recipe's functions on fake tensors, with all layers or with so many. Return the plan of
    each length."""
    config = _plannable(request.config)
    request = dataclasses.replace(request, config=config)
    has_media = request.media is not None
    model_config, headers = shared_headers(request, layers, with_towers=has_media)
    tracker = MemoryTracker(request.device)
    inputs = []
    for length in lengths:
        one = dataclasses.replace(request, pack_length=length)
        inputs.append(_inputs_of(one, model_config, recipe.build_objective(config)))
    with _planning(request, tracker) as ranks, sampled_pieces(tracker.repeated):
        models.choose_head(model_config, config.preference.entry.has_score)
        model_request = models.ModelRequest(
            config,
            request.folder,
            model_config,
            request.new_tokens,
            with_towers=request.media is not None,
            open_loader=loader_of_headers(headers),
        )
        built = recipe.build_model(model_request, ranks, tracker)
        tracker.watch(built, config.train.activation_checkpointing != "selective")
        objective = recipe.build_objective(config)
        if first_pass := objective.first_pass(config):
            first_pass.fill_for_plan()
        optimizer = _build_optimizer(built.model, config, tracker)
        training_parts = _TrainingParts(recipe, built, objective, optimizer, tracker, ranks)
        steps = [_plan_step(each, training_parts) for each in inputs]
        tracker.peaks = {}
        tracker.enter("save")
        is_validated = config.train.run_validation and request.has_validation
        state = checkpoint.own_state(built.model, optimizer, ranks)
        saved_bytes = 0
        if request.device != "cpu" or saves_copies(config, is_validated):
            # What `HostBlock.copy` allocates. Copying each tensor took a quarter of the time of a plan.
            saved_bytes = checkpoint.HostBlock.bytes_for(state.values())
            torch.empty(saved_bytes, dtype=torch.uint8)
    stored = states_of(optimizer)
    stored += [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    # over all ranks
    checkpoint_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    result_bytes = result_bytes_of(config, built)
    pinned_excess = pinned_excess_of(built.model)
    plans = []
    for step in steps:
        step.peaks["save"] = tracker.peaks["save"]
        plan = Plan(
            device=request.device,
            world_size=request.world_size,
            checkpoint_bytes=checkpoint_bytes,
            result_bytes=result_bytes,
            tokens=step.tokens,
            is_quick=layers is not None,
            **_costs(step),
            **_memory(request, step, saved_bytes, pinned_excess),
        )
        plans.append(plan)
    return plans


class _TrainingParts(NamedTuple):
    """What takes a planned step."""

    recipe: Recipe
    built: models.BuiltModel
    objective: training.Objective
    optimizer: torch.optim.Optimizer
    tracker: MemoryTracker
    ranks: Ranks


class _StepInputs(NamedTuple):
    """A request for one length, the tokens of its longest example, and its largest micro-batches."""

    request: PlanRequest
    context_length: int
    longest: int
    batch: Batch
    validation: Batch | None


def _inputs_of(
    request: PlanRequest, model_config: PretrainedConfig, objective: training.Objective
) -> _StepInputs:
    """Return the largest micro-batches for the length of a request. They have values: labels are
    read."""
    context_length = _context_length(request, model_config)
    longest = min(context_length, request.longest_example or context_length)
    if steps := request.config.preference.entry.generated_steps(request.config):
        share = min(request.target_share, steps.most_target_share(longest))
        request = dataclasses.replace(request, target_share=share)
    together = objective.examples_per_sample
    batches = _largest_batches(request, model_config, context_length, together)
    return _StepInputs(request, context_length, longest, *batches)


class _PlannedStep(NamedTuple):
    """What was counted in a planned step and evaluation."""

    tokens: int
    micro_batches: int
    flops: int
    moved_bytes: int
    peaks: dict[Phase, Peak]  # with that of loading
    kept_peaks: list[Peak]  # see `Plan`
    host_activation_bytes: int  # offloaded
    generation: dict[str, int]  # fields of a plan, see `PlannedGeneration`


def _plan_step(inputs: _StepInputs, parts: _TrainingParts) -> _PlannedStep:
    """Take a step and evaluate."""
    recipe, built, objective, optimizer, tracker, ranks = parts
    request, context_length, longest, batch, validation = inputs
    config = request.config
    tracker.forget_steps()
    waiting = _without_values(batch, config, request.device)
    if validation is not None:
        _without_values(validation, config, "cuda")
    steps = config.preference.entry.generated_steps(config)
    count = config.train.gradient_accumulation_steps
    if steps is not None:
        count = steps.micro_batches(request.data_size, config.train.batch_size_training)
    flops = _step_flops(config, built.model, batch, request.target_share, count)
    generation = dict[str, int]()
    if steps is not None:
        plan = resolve_name(steps.plan)

        def generate() -> Any:
            tracker.enter("generation")
            return plan(built.model, config, longest, ranks.answering.size)

        generation = vars(generate_twice(generate, built, tracker))
    loop = training.LoopState(config, training.TrainState(config.train).scale, None, tracker)
    planned = [batch] * min(count, PLANNED_MICRO_BATCHES)
    step = StepBatches(batches=planned, target_tokens=1, samples=1)
    outcome = recipe.train_step(built, objective, optimizer, step, loop, ranks)
    moved_bytes = tracker.moved.of_step(count)
    losses = outcome.losses  # they exist during an evaluation
    del outcome
    tracker.assign(states_of(optimizer), "optimizer state")
    if validation is not None and steps is None:  # else answers are scored
        _validate(built, objective, validation, tracker, ranks)
    del losses
    plan_answers(config.train, validation is not None, longest, built, tracker)
    del waiting
    return _PlannedStep(
        batch.tokens,
        count,
        flops,
        moved_bytes,
        tracker.peaks,
        list(tracker.kept_peaks.values()),
        tracker.most_offloaded_bytes,
        generation,
    )


def _costs(step: _PlannedStep) -> dict[str, Any]:
    """Return the fields of a plan about computing and generation."""
    computing = {"step_flops": step.flops, "step_bytes": step.moved_bytes}
    return {**computing, "micro_batches": step.micro_batches, **step.generation}


def _context_length(request: PlanRequest, model_config: PretrainedConfig) -> int:
    if request.pack_length is not None:
        return request.pack_length
    return models.resolve_context_length(request.config.data.context_length, model_config)


def _largest_batches(
    request: PlanRequest, model_config: PretrainedConfig, context_length: int, together: int
) -> tuple[Batch, Batch | None]:
    """Return the largest micro-batches of training and of validation; None without validation.
    `together`: the objective's examples per sample."""
    config = request.config
    samples = config.train.batch_size_training
    if request.size is not None:
        samples = min(samples, max(1, -(-request.size // request.data_size)))
    batch = _full_batch(request, samples * together, context_length)
    example = None
    if request.media is not None:
        example = request.media.example(request, model_config, batch.example_lengths[0])
        batch = example.batch(batch)
    if not (config.train.run_validation and request.has_validation):
        return batch, None
    validation = _full_batch(request, config.train.val_batch_size * together, context_length)
    if example is not None:
        validation = example.batch(validation)
    return batch, validation


def _without_values(batch: Batch, config: Config, device: str) -> list[torch.Tensor]:
    """Replace tensors of media in a micro-batch by ones without storage, which count as memory. Return
    those of further micro-batches that wait in host memory, if that is the device's."""
    if batch.media is None:
        return []
    steps = STEPS_AHEAD + 1 if device == "cpu" else 0
    return batch.media.without_values(steps * config.train.gradient_accumulation_steps)


def _build_optimizer(
    model: PreTrainedModel, config: Config, tracker: MemoryTracker
) -> torch.optim.Optimizer:
    """Return the optimizer after a first step, which only creates its states: that needs no forward
    pass. Peaks of this step do not count, since the step after it has them, too."""
    optimizer = training.build_optimizer(model, config.train)
    model.train()
    tracker.enter("optimizer step")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker.assign(states_of(optimizer), "optimizer state")
    return optimizer


def _validate(
    built: models.BuiltModel,
    objective: training.Objective,
    batch: Batch,
    tracker: MemoryTracker,
    ranks: Ranks,
) -> None:
    """Run an evaluation of one batch."""
    tracker.enter("evaluation")
    built.model.eval()
    with torch.no_grad():
        objective.loss(built, batch, ranks)
    training.free_unsharded(built.model)
    built.model.train()


def _step_flops(
    config: Config, model: PreTrainedModel, batch: Batch, target_share: float, count: int
) -> int:
    """Return the FLOPs of one rank's optimizer step of `count` micro-batches. Selective activation
    checkpointing recomputes no matmuls."""
    formula = flop_formula(model)
    train = config.train
    shares = {"full": 1.0, "every_k": 1 / train.activation_checkpointing_k}
    recomputed_share = shares.get(str(train.activation_checkpointing), 0.0)
    lengths = batch.example_lengths
    once = sum(formula.of(lengths, round(batch.tokens * target_share)))
    again = recomputed_share * formula.recomputed(lengths)
    whole = (once + again) * count
    return round(whole / config.fsdp.sequence_parallel_size)


def _full_batch(request: PlanRequest, samples: int, context_length: int) -> Batch:
    """Return the largest possible micro-batch."""
    is_packed = request.config.data.batching_strategy == "packing"
    length = context_length
    if not is_packed and request.longest_example:
        length = min(context_length, request.longest_example)
    # one sample per packed sequence: attention over each sample is then largest
    lengths = [length] * samples
    if not is_packed and samples > 1:
        # Samples of different lengths need a mask, which each layer keeps for its backward pass.
        lengths[-1] -= 1
    shape = (1, length * samples) if is_packed else (samples, length)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels = ids.clone()
    labels[:, round(labels.shape[1] * request.target_share) :] = IGNORED
    return Batch(ids, labels, lengths, is_packed, [""] * samples, [True] * samples)


def _memory(
    request: PlanRequest, step: _PlannedStep, saved_bytes: int, pinned_excess: int
) -> dict[str, Any]:
    """Return the fields of a plan about memory of the device and of the host.

    Args:
        request: the run.
        step: with the peaks of all phases.
        saved_bytes: of the copies for a checkpoint.
        pinned_excess: see `pinned_excess_of`.
    """
    by_phase = step.peaks
    kept_peaks = step.kept_peaks
    load = by_phase["load"]
    save = by_phase["save"]
    if request.device == "cpu":
        peaks = list(by_phase.values())
        largest = max(peak.bytes for peak in peaks)
        reserved = 0
        settings = request.config.checkpoint
        if settings.save_async and settings.save_steps > 0:
            # The copy that is written in the background still exists during the next step.
            in_training = [peak.bytes for peak in peaks if peak.phase not in ("load", "save")]
            reserved = max(in_training) + saved_bytes
        outside = 0
        on_host = {"host_load_bytes": load.bytes, "host_save_bytes": save.bytes}
    else:
        # copies are on the host
        peaks = [peak for peak in by_phase.values() if peak is not save]
        offloaded = 0
        # gradients move to the host as soon as they are reduced
        if request.config.fsdp.fsdp_cpu_offload:
            offloaded = sum(by_phase["optimizer step"].holders[holder] for holder in OFFLOADED)
            peaks = [_without_offloaded(peak) for peak in peaks]
            kept_peaks = [_without_offloaded(peak) for peak in kept_peaks]
        largest = max(peak.bytes for peak in peaks)
        reserved = round(SLACK * largest)
        outside = CUDA_CONTEXT_BYTES + (NCCL_BYTES if request.world_size > 1 else 0)
        on_host_always = offloaded + pinned_excess if offloaded else 0
        on_host = {
            "host_load_bytes": load.holders["temporaries"] + on_host_always,
            "host_save_bytes": saved_bytes + on_host_always,
        }
    return {
        "peaks": peaks,
        "kept_peaks": kept_peaks,
        "reserved_bytes": max(largest, reserved),
        "outside_bytes": outside,
        "sequence_size": request.config.fsdp.sequence_parallel_size,
        "host_activation_bytes": step.host_activation_bytes,
        **on_host,
    }


def _without_offloaded(peak: Peak) -> Peak:
    holders = peak.holders | dict.fromkeys(OFFLOADED, 0)
    return Peak(peak.phase, sum(holders.values()), holders)


def _plannable(config: Config) -> Config:
    """Return the settings with those replaced that cannot be planned. The packages of flash
    attention and Liger may be missing here: sdpa takes as much memory as flash attention, and layers
    without Liger take more. Layers are planned without torch.compile."""
    implementation = config.model.attn_implementation
    attention = "sdpa" if implementation.startswith("flash") else implementation
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, attn_implementation=attention, use_liger=False, compile=False
        ),
    )


def _extrapolate(few: Plan, more: Plan, layers: int) -> Plan:
    """Extrapolate the plans of two models with few layers: each further layer adds the same
    memory."""
    first, second = QUICK_LAYERS

    def at(a: int, b: int) -> int:
        return round(a + (b - a) * (layers - first) / (second - first))

    def all_at(few_peaks: list[Peak], more_peaks: list[Peak]) -> list[Peak]:
        peaks = []
        for before, after in zip(few_peaks, more_peaks, strict=True):
            holders = dict[MemoryCategory, int]()
            for name, size in before.holders.items():
                holders[name] = at(size, after.holders[name])
            peaks.append(Peak(before.phase, sum(holders.values()), holders))
        return peaks

    peaks = all_at(few.peaks, more.peaks)
    kept_peaks = all_at(few.kept_peaks, more.kept_peaks)
    names = (
        "host_load_bytes",
        "host_save_bytes",
        "host_activation_bytes",
        "checkpoint_bytes",
        "result_bytes",
        "reserved_bytes",
        "step_flops",
        "step_bytes",
        "generation_flops",
        "generation_bytes",
    )
    numbers = dict[str, Any]()
    for field in names:
        numbers[field] = at(getattr(few, field), getattr(more, field))
    largest = max(peak.bytes for peak in peaks)
    on_cpu = max(largest, numbers["reserved_bytes"])  # above the peaks if a copy is being written
    numbers["reserved_bytes"] = round(SLACK * largest) if more.device == "cuda" else on_cpu
    return dataclasses.replace(more, peaks=peaks, kept_peaks=kept_peaks, **numbers)


def _planned_target(request: PlanRequest) -> Target:
    if request.device == "cpu":
        return Target()
    # fp16 is for a GPU without bf16, such as a T4.
    capability = T4 if request.config.train.precision == "fp16" else AMPERE
    return Target("cuda", capability, "nccl")


@contextmanager
def _fake_world(request: PlanRequest) -> Iterator[Ranks]:
    """Start a fake process group and yield its rank 0, on the CPU, with the planned target. Raises
    UserError if the ranks cannot be divided."""
    ranks = request.world_size
    local_ranks = request.local_world_size
    degree = resolve_degree(models.shard_degree(request.config.fsdp), ranks, local_ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        here = torch.device("cpu")
        mesh = mesh_over("cpu", ranks, degree)
        target = _planned_target(request)
        with computing_on(target):
            sequence = share_sequences("cpu", ranks, request.config.fsdp.sequence_parallel_size)
            yield Ranks(
                0, ranks, 0, local_ranks, here, here, "fake", mesh, None,
                target=target, sequence=sequence,
            )  # fmt: skip
    finally:
        dist.destroy_process_group()


@contextmanager
def _planning(request: PlanRequest, tracker: MemoryTracker) -> Iterator[Ranks]:
    """In the block, all tensors are fake and counted. Yield rank 0 of the planned ranks."""
    with (
        _fake_world(request) as ranks,
        planned_models(request.device, sdpa_of_a_gpu),
        tracker.planning(),
    ):
        yield ranks
