"""What a run will hold: its model is built, sharded and loaded and a step is made, on fake tensors."""

import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, models, training
from llama_ft.config import Config
from llama_ft.data import IGNORED, Batch
from llama_ft.errors import UserError
from llama_ft.phases import MemoryCategory, Phase
from llama_ft.plan.cuda_allocator import reserved_bytes
from llama_ft.plan.fake_checkpoint import fake_checkpoint, layers_are_alike, planned_models
from llama_ft.plan.tracker import Tracker
from llama_ft.plan.types import Peak, Plan
from llama_ft.runtime import Runtime, log
from llama_ft.runtime.devices import DeviceNote
from llama_ft.runtime.process_group import mesh_over, resolve_degree

# CUDA's context with the libraries' kernels, and NCCL's buffers for a few communicators: not torch's to count.
CUDA_CONTEXT_BYTES, NCCL_BYTES = 600 * 2**20, 500 * 2**20
QUICK_LAYERS = (3, 5)
# Of CUDA's allocator where it is not simulated. Full plans took 1.01 to 1.07; full tuning of 3 B and 8 B on one GPU,
# and of 70 B in bf16_mixed on 16, 1.2 to 1.4.
SLACK = 1.07
MOST_TOKENS = 2**24  # of a micro-batch: its ids and positions are real
MOST_MICRO_BATCHES = 2  # every further one is like the second

BuildModel = Callable[..., tuple[PreTrainedModel, models.Adapter | None, dict[str, torch.dtype], list[models.Unit]]]


@dataclass(frozen=True)
class PlanRequest:
    """What is planned.

    Attributes:
        config: the run's settings.
        folder: of the model: config.json, and the checkpoint's headers where there are weights.
        world_size: ranks.
        local_world_size: ranks of a node.
        device: what they compute on.
        longest_row: tokens of the longest row, which may be truncated, for padded batches; None: context_length.
        new_tokens: that the model gets rows for.
        target_share: of the tokens, how many count in the loss.
        size: packs, or rows, that there are; None: enough.
        has_validation: whether there are rows to evaluate on.
    """

    config: Config
    folder: Path
    world_size: int
    local_world_size: int
    device: Literal["cuda", "cpu"]
    longest_row: int | None = None
    new_tokens: models.NewTokens | None = None
    target_share: float = 1.0
    size: int | None = None
    has_validation: bool = True

    def micro_batch(self, packs: int) -> int:
        """Of `packs` a micro-batch, how many a rank has."""
        return packs if self.size is None else min(packs, max(1, -(-self.size // self.world_size)))


def predict(request: PlanRequest, build_model: BuildModel, quick: bool = False) -> Plan:
    """Plan the memory of rank 0. This process must not have a process group.

    Args:
        request: what is planned.
        build_model: the recipe's.
        quick: extrapolate from models of 3 and 5 layers, where all layers are alike.

    Raises:
        UserError: as the run itself would.
    """
    started = time.perf_counter()
    with _quiet():
        model_config = models.load_model_config(request.folder, request.config.model.trust_remote_code)
        layers = getattr(model_config.get_text_config(), "num_hidden_layers", 0)
        is_quick = quick and layers > QUICK_LAYERS[1] and layers_are_alike(model_config, request.config.model)
        if is_quick:
            few, more = (_plan_with(request, build_model, count) for count in QUICK_LAYERS)
            plan = _extrapolate(few, more, layers, request)
        else:
            plan = _plan_with(request, build_model, None)
    return dataclasses.replace(plan, is_quick=is_quick, seconds=time.perf_counter() - started)


def _plan_with(request: PlanRequest, build_model: BuildModel, layers: int | None) -> Plan:
    config = _plannable(request.config)
    degree = models.shard_degree(config.fsdp)
    with (
        fake_checkpoint(request.folder, config.model, layers) as folder,
        _fake_world(request.world_size, request.local_world_size, degree) as job,
    ):
        tracker = Tracker(request.device)
        model_config = models.load_model_config(folder, config.model.trust_remote_code)
        context_length = models.resolve_context_length(config.data.context_length, model_config)
        batch = _full_batch(request, request.micro_batch(config.train.batch_size_training), context_length)
        validation = None
        if config.train.run_validation and request.has_validation:
            validation = _full_batch(request, config.train.val_batch_size, context_length)
        with planned_models(request.device), tracker.planning():
            model, _, stored_dtypes, units = build_model(config, folder, model_config, request.new_tokens, tracker, job)
            tracker.watch(model)
            optimizer = training.build_optimizer(model, config.train)
            model.train()
            tracker.enter("optimizer step")
            _make_states(model, optimizer, tracker)
            micro_batches = [batch] * min(config.train.gradient_accumulation_steps, MOST_MICRO_BATCHES)
            _one_step(config, model, optimizer, micro_batches, validation, tracker, job)
            of_the_device = len(tracker.ledger.events)
            tracker.enter("save")
            saved = checkpoint.to_host(checkpoint.own_state(model, optimizer, job))
            del tracker.ledger.events[of_the_device:]  # copies lie on the host
        return _plan_of(request, config, model, optimizer, stored_dtypes, units, saved, context_length, tracker)


def _make_states(model: PreTrainedModel, optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
    """What the first step leaves behind: the step that is planned is a later one."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker.note_optimizer(optimizer)
    tracker.forget_steps()


def _one_step(
    config: Config,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[Batch],
    validation: Batch | None,
    tracker: Tracker,
    job: Runtime,
) -> None:
    """The recipe's step and an evaluation, as its training loop makes them."""
    settings = config.train
    reduce_last_only = config.peft.use_peft or settings.accumulate_unsharded
    scale = training.TrainState(settings).scale.factor
    objective = training.SupervisedFineTuning()
    losses = training.accumulate_gradients(model, objective, micro_batches, 1, reduce_last_only, job, scale, tracker)
    tracker.enter("optimizer step")
    training.clip_and_reduce_norm(model, losses, 1, settings, scale, job)
    training.update_weights(optimizer, settings.lr)
    tracker.note_optimizer(optimizer)
    if validation is not None:
        tracker.enter("evaluation")
        model.eval()
        with torch.no_grad():
            objective.loss(model, validation, job)
        training.free_unsharded(model)
        model.train()


def _full_batch(request: PlanRequest, rows: int, context_length: int) -> Batch:
    """A micro-batch as large as one can be."""
    data = request.config.data
    if (tokens := rows * context_length) > MOST_TOKENS:
        raise UserError(
            f"--batch_size_training, --val_batch_size: a micro-batch of {tokens:,} tokens is not planned; at most "
            f"{MOST_TOKENS:,} are."
        )
    if data.batching_strategy == "packing":
        # On CUDA one kernel takes all rows; on the CPU attention goes row by row, here a row a pack.
        lengths = [context_length * rows] if request.device == "cuda" else [context_length] * rows
        ids = torch.zeros(1, context_length * rows, dtype=torch.int64)
    else:
        lengths = [min(context_length, request.longest_row or context_length)] * rows
        ids = torch.zeros(rows, lengths[0], dtype=torch.int64)
    labels = ids.clone()
    labels[:, round(labels.shape[1] * request.target_share) :] = IGNORED
    return Batch(ids, labels, lengths, data.batching_strategy == "packing", [""] * len(lengths))


def _plan_of(
    request: PlanRequest,
    config: Config,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    stored_dtypes: dict[str, torch.dtype],
    units: list[models.Unit],
    saved: dict[str, torch.Tensor],
    context_length: int,
    tracker: Tracker,
) -> Plan:
    ledger = tracker.ledger
    peaks = [_on_device(peak, request) for peak in ledger.peaks.values()]
    by_phase: dict[Phase, Peak] = {peak.phase: peak for peak in peaks}
    is_cuda = request.device == "cuda"
    if is_cuda:
        by_phase.pop("save", None)  # copies lie on the host
    unit = max(units, key=lambda unit: unit.bytes)
    peaks = list(by_phase.values())
    saved_bytes = sum(tensor.nbytes for tensor in saved.values())
    staged = sum(_global_bytes(p) for p in model.parameters() if p.requires_grad) + sum(
        _global_bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    load = ledger.peaks["load"]
    offloaded = _offloaded_bytes(ledger.peaks["optimizer step"]) if request.config.fsdp.fsdp_cpu_offload else 0
    tokens = request.micro_batch(request.config.train.batch_size_training) * min(
        context_length, request.longest_row or context_length
    )
    return Plan(
        device=request.device,
        world_size=request.world_size,
        rank=0,
        peaks=peaks,
        timeline=ledger.timeline,
        reserved_bytes=_reserved(request, by_phase, saved_bytes, ledger.events),
        outside_bytes=CUDA_CONTEXT_BYTES + (NCCL_BYTES if request.world_size > 1 else 0) if is_cuda else 0,
        host_load_bytes=load.holders["temporaries"] + offloaded if is_cuda else load.bytes,
        host_save_bytes=saved_bytes + offloaded if is_cuda else by_phase["save"].bytes,
        checkpoint_bytes=staged,
        result_bytes=_result_bytes(config, model, stored_dtypes),
        sent_bytes=dict(tracker.traffic.sent),
        largest_unit=unit.name,
        largest_unit_bytes=unit.bytes,
        tokens=tokens,
        is_quick=False,
        seconds=0.0,
    )


def _reserved(request: PlanRequest, peaks: dict[Phase, Peak], saved_bytes: int, events: list[tuple[int, int]]) -> int:
    largest = max(peak.bytes for peak in peaks.values())
    if request.device == "cpu":
        # The copy that is written in the background is there during the next step.
        is_beside = request.config.checkpoint.save_async and request.config.checkpoint.save_steps > 0
        beside = max(peak.bytes for phase, peak in peaks.items() if phase not in ("load", "save"))
        return max(largest, beside + saved_bytes if is_beside else 0)
    if request.config.fsdp.fsdp_cpu_offload:  # the events are of all tensors, wherever they are
        return round(SLACK * largest)
    return max(largest, reserved_bytes(events))


def _plannable(config: Config) -> Config:
    """What the plan does apart: offloading needs a GPU, and is a matter of where the same tensors are; flash attention
    and Liger's kernels are packages that may not be here: sdpa holds as much as the one, and more than the other.
    Layers are planned as they are without torch.compile."""
    wanted = config.model.attn_implementation
    attention = "sdpa" if wanted.startswith("flash") else wanted
    return dataclasses.replace(
        config,
        fsdp=dataclasses.replace(config.fsdp, fsdp_cpu_offload=False),
        train=dataclasses.replace(config.train, activation_offload=False),
        model=dataclasses.replace(config.model, attn_implementation=attention, use_liger=False, compile=False),
    )


OFFLOADED: tuple[MemoryCategory, ...] = ("sharded parameters", "quantized parts", "optimizer state")


def _offloaded_bytes(peak: Peak) -> int:
    return sum(peak.holders[holder] for holder in OFFLOADED) + peak.holders["gradients"]


def _on_device(peak: Peak, request: PlanRequest) -> Peak:
    """Without what offloading keeps on the host."""
    if not request.config.fsdp.fsdp_cpu_offload:
        return peak
    holders: dict[MemoryCategory, int] = {**peak.holders, **dict.fromkeys(OFFLOADED, 0)}
    holders["gradients"] = 0  # they go to the host as soon as they are reduced; a unit's own, before that, are few
    return dataclasses.replace(peak, holders=holders, bytes=sum(holders.values()))


def _global_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a DTensor's are those of all ranks


def _result_bytes(config: Config, model: PreTrainedModel, stored_dtypes: dict[str, torch.dtype]) -> int:
    asked = checkpoint.save_dtype(config.checkpoint.save_dtype)
    if not config.checkpoint.save_model:
        return 0
    total = 0
    for name, parameter in model.named_parameters():
        if config.peft.use_peft and not parameter.requires_grad:
            continue
        dtype = asked or (torch.float32 if config.peft.use_peft else stored_dtypes.get(name, parameter.dtype))
        total += parameter.numel() * dtype.itemsize
    return total


def _extrapolate(few: Plan, more: Plan, layers: int, request: PlanRequest) -> Plan:
    """Every further layer holds what the ones before it hold."""
    first, second = QUICK_LAYERS

    def at(a: int, b: int) -> int:
        return round(a + (b - a) * (layers - first) / (second - first))

    peaks = []
    for before, after in zip(few.peaks, more.peaks, strict=True):
        holders = {name: at(before.holders[name], after.holders[name]) for name in before.holders}
        peaks.append(Peak(before.phase, sum(holders.values()), holders, after.module))
    numbers: dict[str, Any] = {
        name: at(getattr(few, name), getattr(more, name))
        for name in ("host_load_bytes", "host_save_bytes", "checkpoint_bytes", "result_bytes")
    }
    sent = {name: at(few.sent_bytes[name], more.sent_bytes[name]) for name in few.sent_bytes}
    largest = max(peak.bytes for peak in peaks)
    on_cpu = at(few.reserved_bytes, more.reserved_bytes)  # and more than the peaks where a copy is being written
    numbers["reserved_bytes"] = round(SLACK * largest) if request.device == "cuda" else max(largest, on_cpu)
    return dataclasses.replace(more, peaks=peaks, timeline=[], sent_bytes=sent, **numbers)


@contextmanager
def _fake_world(world_size: int, local_world_size: int, degree: int | str) -> Iterator[Runtime]:
    """Rank 0 of `world_size`, on the CPU. This process must have no process group.

    Args:
        world_size: ranks.
        local_world_size: ranks of a node.
        degree: as `runtime.start` takes it.

    Raises:
        UserError: the ranks do not divide into groups.
    """
    degree = resolve_degree(degree, world_size, local_world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        here = torch.device("cpu")
        note = DeviceNote(socket.gethostname(), "fake", "")
        mesh = mesh_over("cpu", world_size, degree)
        yield Runtime(0, world_size, 0, local_world_size, here, here, note, mesh, None)
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what building says: it is said by the run itself."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
