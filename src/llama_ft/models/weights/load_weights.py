"""Load the weights of a sharded model: each rank's rows are streamed from the checkpoint. Neither
way of loading (see loader.py) holds a whole model in memory, or a whole tensor of another rank."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.libraries.transformers_private import private
from llama_ft.models.adapters.lora import first_values
from llama_ft.models.adapters.names import ADAPTER_WEIGHTS, ModelNames, WeightNames
from llama_ft.models.adapters.pissa import first_factors, lora_layers
from llama_ft.models.adapters.saved_adapter import (
    check_saved_adapter,
    differing_copies,
    left_out,
    other_base,
)
from llama_ft.models.architecture.new_tokens import TokenRows
from llama_ft.models.base.shards import ShardGroup, local_shard
from llama_ft.models.base.source import (
    StoredTensor,
    WeightSource,
    listed,
)
from llama_ft.models.built import Adapter, BuiltModel, ModelRequest, StoredModel
from llama_ft.models.published.formats import tensor_suffixes
from llama_ft.models.published.weight_format import StoredScheme
from llama_ft.models.quantization.bitsandbytes_4bit import belongs_to_4bit, is_4bit, read_4bit
from llama_ft.models.quantization.layers import FourBit
from llama_ft.models.weights.conversion import RECOMPUTED
from llama_ft.models.weights.loader import Loader, ShardLoad, open_loader
from llama_ft.runtime.console import log
from llama_ft.runtime.process_group import Ranks
from llama_ft.runtime.target import current_target

NORM_ROWS = 1024
# An attribute of parameters and buffers loaded from the checkpoint: Transformers' _init_weights
# does not change them.
INITIALIZED = "_is_hf_initialized"
# Number of weights. On the CPU, ranks held at most 11 to 54 MiB in addition to their shards. On a
# GPU, starting kernels for so few would take longer than the work; there 2**24 weights are 32 MiB
# in bf16.
QUANTIZED_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}


@dataclass(frozen=True)
class LoadSettings:
    """How weights are loaded."""

    peft: PeftConfig  # where the adapter's first values come from
    seed: int  # for the first values of an adapter and of a new score head
    quantized_from: torch.dtype  # weights are rounded to it before they are quantized
    scatter: bool = False  # rank 0 reads and sends (`low_cpu_fsdp`)
    # weights of a checkpoint to load later (with an adapter), or now in place of the base model's of
    # the same names; not with `scatter`
    trained: WeightSource | None = None
    open_loader: Callable[..., Loader] = open_loader  # a plan has one that reads no weights

    @staticmethod
    def of(request: ModelRequest) -> "LoadSettings":
        """Return how the weights of a requested model are loaded."""
        config = request.config
        return LoadSettings(
            peft=config.peft,
            seed=config.train.seed,
            quantized_from=request.quantized_from or request.precision.frozen,
            scatter=config.fsdp.low_cpu_fsdp,
            trained=request.trained,
            open_loader=request.open_loader or open_loader,
        )


def load_weights(built: BuiltModel, ranks: Ranks, settings: LoadSettings) -> StoredModel:
    """Allocate this rank's shards on its device and load them.

    Args:
        built: the sharded model on the meta device, possibly with an adapter.
        ranks: the ranks the model is sharded over. Shards live on their storage device, buffers
            where they compute, and there weights are quantized.
        settings: see LoadSettings.

    Returns:
        The dtypes in the checkpoint, its tensors that are not loaded, and its conversions.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or a file cannot be read.
    """
    model = built.model
    adapter = built.adapter
    trained = settings.trained
    device = ranks.device
    group = ShardGroup(ranks)
    replaced = trained if adapter is None else None
    loader = settings.open_loader(
        built.folder, built, group, settings.scatter, settings.seed, replaced
    )
    keys = account_for(loader.names, loader.headers, built.folder)
    adapter_loader = None
    if adapter is not None and trained is None:
        adapter_loader = _open_saved_adapter(built, settings, loader)
    _allocate(model, device, ranks.storage_device)
    with torch.no_grad():
        _fill_base(built, keys, loader, settings.quantized_from, device)
        if adapter is not None and adapter_loader is not None:
            parameters = dict(model.named_parameters())
            for name, key in adapter.keys.items():
                load = _as_stored(parameters[name], key, adapter_loader.headers)
                adapter_loader.fill(load)
            adapter_loader.finish()
        elif adapter is not None and trained is None:
            _fill_new_adapter(built, keys, loader, settings, device)
        loader.finish()
        if adapter is not None and trained is None and adapter_loader is None:
            # after `finish`: they are computed from loaded weights
            _set_dora_magnitudes(model)
        _fill_buffers(model, loader)
    if device.type == "cuda" and any(weight.quantized for weight in loader.names.weights.values()):
        # raises earlier errors here; bitsandbytes' next call would exit
        torch.cuda.synchronize(device)
    for name, key in loader.names.buffers.items():
        if key in loader.headers:
            keys[name] = key
    dtypes = {name: loader.headers[key].dtype for name, key in keys.items()}
    untouched = {name: header for name, header in loader.headers.items() if header.is_untouched}
    return StoredModel(dtypes, untouched, loader.conversions)


def _open_saved_adapter(
    built: BuiltModel, settings: LoadSettings, base_loader: Loader
) -> Loader | None:
    """Open the adapter that is continued; None if a new one is trained. `base_loader`: of the base
    model."""
    if not settings.peft.from_peft_checkpoint:
        return None
    assert built.adapter is not None
    folder = Path(settings.peft.from_peft_checkpoint)
    file = folder / ADAPTER_WEIGHTS
    loader = base_loader.for_file(file)
    base = base_loader.source  # None on ranks that do not read it
    copies = check_saved_adapter(loader.headers, built, loader.names, file)
    warning = None
    problem = None
    if base is not None:
        warning = other_base(folder, built.adapter.config.base_model_name_or_path, built.folder)
        if copies:
            problem = differing_copies(file, copies, loader.names, base)
    if settings.scatter:
        box = [problem]
        dist.broadcast_object_list(box, src=0)
        problem = box[0]
    if warning:
        log.warning(warning)
    if problem:
        raise UserError(problem)
    if copies:
        log.info(left_out(file, copies))
    return loader


def _fill_base(
    built: BuiltModel,
    keys: dict[str, str],
    loader: Loader,
    quantized_from: torch.dtype,
    device: torch.device,
) -> None:
    """Load the weights of the base model. `keys`: parameter -> its name in the checkpoint."""
    parameters = dict(built.model.named_parameters())
    threads = torch.get_num_threads()
    for name, key in keys.items():
        weight = loader.names.weights[name]
        if weight.quantized is None:
            loader.fill(_as_stored(parameters[name], key, loader.headers))
            continue
        quantized = weight.quantized
        shards = [local_shard(parameters[each]) for each in (name, quantized.scale)]
        if isinstance(quantized.scheme, StoredScheme):
            loader.fill(_to_stored(shards, weight, key, loader))
        else:
            # Quantization is many small operations. If other programs use the cores, waiting for
            # all threads after each takes longer than the work: 26 s instead of 3 s for 450 M
            # weights in 8 bits on 4 cores.
            torch.set_num_threads(1)
            loader.fill(_to_quantized(shards, weight, key, quantized_from, device))
            torch.set_num_threads(threads)


def _fill_new_adapter(
    built: BuiltModel,
    keys: dict[str, str],
    loader: Loader,
    settings: LoadSettings,
    device: torch.device,
) -> None:
    """Set the first values of a new adapter. PiSSA's and those of new tokens come from the base
    model's weights."""
    model = built.model
    adapter = built.adapter
    assert adapter is not None
    parameters = dict(model.named_parameters())
    for name, value in first_values(adapter, settings.seed):
        first, last = loader.group.own_rows(len(value))
        local_shard(parameters[name]).copy_(value[first:last])
    if adapter.trained_rank:
        stored = {id(parameters[name]): key for name, key in keys.items()}
        for layer in lora_layers(model):
            key = stored[id(layer.get_base_layer().weight)]
            kind = settings.peft.init_lora_weights
            _fill_singular_values(layer, key, loader, adapter, kind, device)
    for name, module in model.named_modules():
        if isinstance(module, TokenRows) and module.tied_adapter is None:
            copies = module.trainable_tokens_delta["default"]
            ids = module.token_indices["default"]
            key = keys[f"{name}.base_layer.weight"]
            loader.fill(_as_stored(copies, key, loader.headers, ids))


def _as_stored(
    parameter: torch.Tensor,
    key: str,
    headers: dict[str, StoredTensor],
    ids: list[int] | None = None,
) -> ShardLoad:
    """Return the load of a stored tensor's rows, or of the rows `ids`."""

    def make(source: WeightSource, start: int, stop: int) -> list[torch.Tensor]:
        if ids is None:
            return [source.read_rows(key, start, stop)]
        rows = []
        for id_ in ids[start:stop]:
            rows.append(source.read_rows(key, id_, id_ + 1))
        return [torch.cat(rows)]

    shard = local_shard(parameter)
    # Send the narrower of the two dtypes: the conversion gives the same bits on both sides.
    wire = min(headers[key].dtype, shard.dtype, key=lambda dtype: dtype.itemsize)
    return ShardLoad([shard], tuple(parameter.shape), [wire], make)


def _fill_singular_values(
    layer: Any,
    key: str,
    loader: Loader,
    adapter: Adapter,
    kind: str,
    device: torch.device,
) -> None:
    """Set PiSSA's initial A and B of a layer, from the weight named `key`. They are computed on
    `device`."""

    @cache  # A and B have one decomposition
    def factors() -> tuple[torch.Tensor, torch.Tensor]:
        source = cast(WeightSource, loader.source)
        weight = source.read(key).to(device, torch.float32)
        return first_factors(weight, layer, cast(int, adapter.trained_rank), kind)

    def rows_of_a(_: WeightSource, start: int, stop: int) -> list[torch.Tensor]:
        return [factors()[0][start:stop]]

    def rows_of_b(_: WeightSource, start: int, stop: int) -> list[torch.Tensor]:
        return [factors()[1][start:stop]]

    for factor, make in ((layer.lora_A, rows_of_a), (layer.lora_B, rows_of_b)):
        weight = factor["default"].weight
        shape = tuple(weight.shape)
        loader.fill(ShardLoad([local_shard(weight)], shape, [weight.dtype], make))


def _to_stored(
    shards: list[torch.Tensor], weight: WeightNames, key: str, loader: Loader
) -> ShardLoad:
    """Return the load of rows that stay as they are stored."""
    header = loader.headers[key]

    def make(_: WeightSource, start: int, stop: int) -> Sequence[torch.Tensor]:
        assert weight.quantized is not None
        assert isinstance(weight.quantized.scheme, StoredScheme)
        return loader.read_stored(weight.quantized.scheme, header, start, stop)

    return ShardLoad(shards, weight.shape, [shard.dtype for shard in shards], make)


def _to_quantized(
    shards: list[torch.Tensor],
    weight: WeightNames,
    key: str,
    dtype: torch.dtype,
    device: torch.device,
) -> ShardLoad:
    """Return the load of rows that are quantized from `dtype` on `device`, or read as they are if
    the checkpoint is quantized. In a stack a "row" is an expert, and its rows are quantized block
    by block."""
    quantized = weight.quantized
    assert quantized is not None
    scheme = quantized.scheme
    assert not isinstance(scheme, StoredScheme)
    at_once = QUANTIZED_AT_ONCE[current_target().device]
    columns = weight.shape[-1]

    def make(source: WeightSource, start: int, stop: int) -> Sequence[torch.Tensor]:
        if quantized.is_prequantized and isinstance(scheme, FourBit):
            return read_4bit(source, key, columns, scheme, start, stop)
        rows = source.read_rows(key, start, stop).reshape(-1, columns)
        rows_at_once = max(1, at_once // columns)
        quantized_blocks = [
            scheme.quantize(block.to(device=device, dtype=dtype))
            for block in rows.split(rows_at_once)
        ]
        joined: Sequence[torch.Tensor] = quantized_blocks[0]
        if len(quantized_blocks) > 1:
            joined = [torch.cat(blocks) for blocks in zip(*quantized_blocks, strict=True)]
        return [
            rows.view(stop - start, *shard.shape[1:])
            for rows, shard in zip(joined, shards, strict=True)
        ]

    return ShardLoad(shards, weight.shape, [shard.dtype for shard in shards], make, at_once)


def account_for(
    names: ModelNames, headers: dict[str, StoredTensor], folder: Path
) -> dict[str, str]:
    """Return parameter name -> name in the checkpoint. Raises UserError if a name has no
    counterpart, or a shape differs."""
    missing = []
    unlike = []
    not_stored = []
    keys = dict[str, str]()
    for name, weight in names.weights.items():
        candidates = weight.keys + weight.tied_keys
        key = next((candidate for candidate in candidates if candidate in headers), None)
        if key is None:
            missing.append(candidates[0])
            continue
        keys[name] = key
        stored = headers[key]
        packed = is_4bit(key, headers)
        # In 4 bits the tensor is flat, and its bytes may be stored as another dtype.
        fits_in_4_bits = packed and 2 * stored.nbytes == torch.Size(weight.shape).numel()
        fits = fits_in_4_bits or stored.shape == weight.shape
        quantized = weight.quantized
        expects_packed = quantized is not None and quantized.is_prequantized
        if not fits or packed != expects_packed:
            form = " in 4 bits" if packed else ""
            unlike.append(
                f"{key} is {list(stored.shape)}{form}, config.json makes it {list(weight.shape)}"
            )
        elif quantized is not None and isinstance(quantized.scheme, StoredScheme):
            problem = _misfit(quantized.scheme, stored)
            if problem is not None:
                not_stored.append(f"{key} {problem}")
    known = names.known_keys()
    held = set(keys.values())
    extra = [
        key
        for key, header in headers.items()
        if not (key in known or header.is_untouched or belongs_to_4bit(key, held))
        and not RECOMPUTED.search(key)
    ]
    wrong = {"missing": missing, "not part of the model": extra, "not as in config.json": unlike}
    _refuse(folder, wrong, not_stored)
    return keys


def _misfit(scheme: StoredScheme, header: StoredTensor) -> str | None:
    """Return why a weight of the checkpoint cannot be kept as stored, or None."""
    if header.packed is None:
        # A plan from config.json alone knows no more.
        return None if header.is_dequantized else f"is {header.dtype} and not quantized"
    return scheme.misfit(header.packed)


def _refuse(folder: Path, wrong: dict[str, list[str]], not_stored: list[str]) -> None:
    """Raise a UserError if names are wrong, or if weights cannot stay as they are stored. `wrong`: a
    title -> the names."""
    lines = [f"{title}: {listed(names)}" for title, names in wrong.items() if names]
    suffixes = tensor_suffixes() if lines else ()
    if any(key.endswith(suffixes) for key in wrong["not part of the model"]):
        lines.append(
            "Some belong to quantized weights, but not as config.json's quantization_config says. "
            "Download the model again with its config.json, or use a version in 16 bits."
        )
    if not_stored and not lines:
        raise UserError(
            f"{folder}: --quantization as_stored cannot keep {listed(not_stored)}.\n"
            f"Name such modules in --skip_modules: they are read in 16 bits."
        )
    if lines:
        raise UserError("\n".join([f"{folder}: its weights do not match its config.json.", *lines]))


def _allocate(model: nn.Module, device: torch.device, storage_device: torch.device) -> None:
    """Allocate every shard and buffer. to_empty makes two parameters of a tied weight, so tie them
    again."""
    places = defaultdict[int, list[tuple[nn.Module, str]]](list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    model.to_empty(device=storage_device)
    # With CPU offload only parameters are stored on the host. Buffers are not sharded.
    if storage_device != device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
    for (first_module, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first_module, first_name))


def _set_dora_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the norm of each row of W + scaling * B A, where B is zero at first.
    No communication is needed, because weight and magnitude are split into the same rows."""
    for module in model.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            weight = local_shard(cast(nn.Linear, module.base_layer).weight)
            norms = local_shard(magnitude.weight)
            # Blocks limit the size of the fp32 copy.
            blocks = zip(weight.split(NORM_ROWS), norms.split(NORM_ROWS), strict=True)
            for weight_rows, norm_rows in blocks:
                norm_rows.copy_(torch.linalg.vector_norm(weight_rows.float(), dim=1))


def _fill_buffers(model: PreTrainedModel, loader: Loader) -> None:
    """Read the buffers of the checkpoint, and let Transformers compute the others (rotary
    frequencies). Raises UserError if it does not compute one of them."""
    computed = {}
    for name, buffer in model.named_buffers():
        key = loader.names.buffers[name]
        if key not in loader.headers:
            # autograd's counter of in-place writes
            computed[name] = (buffer, buffer._version)
            continue
        if loader.source is not None:
            buffer.copy_(loader.source.read(key))
        if loader.scatter:
            dist.broadcast(buffer, src=0)
        setattr(buffer, INITIALIZED, True)
    for parameter in model.parameters():
        setattr(parameter, INITIALIZED, True)
    compute_buffers(model, model)
    left = [
        name
        for name, (buffer, version) in computed.items()
        if model.get_buffer(name) is buffer and buffer._version == version
    ]
    if left:
        raise UserError(
            f"--model_name: model_type {model.config.model_type} is not supported: neither the checkpoint nor "
            f"Transformers has values for:\n{listed(left)}"
        )


def compute_buffers(module: nn.Module, model: PreTrainedModel) -> None:
    """Let Transformers initialize the modules of `module` with buffers, in its own order: children
    first, each by the innermost model around it. Falcon-H1's decoder fills buffers of its
    layers."""
    model = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        compute_buffers(child, model)
    has_buffers = any(True for _ in module.buffers())
    if not has_buffers:
        return
    fill = private(model, "_init_weights")
    if fill:
        fill(module)
