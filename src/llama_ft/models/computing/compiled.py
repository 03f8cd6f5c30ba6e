"""Fused kernels for decoder layers: graphs of torch.compile, Liger's kernels, or an RMSNorm: torch's
on CUDA, ours on the CPU."""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llama_ft.config import ModelConfig, TrainConfig
from llama_ft.cpu.rms_norm import rms_norm
from llama_ft.errors import UserError, plural, reason
from llama_ft.libraries.evidence import VARYING_DIMENSIONS, has_cache
from llama_ft.models.base.layers import decoder_layers
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.built import BuiltModel
from llama_ft.models.packing.packed_samples import report_missing_kernels
from llama_ft.runtime.console import log
from llama_ft.runtime.target import Target, current_target

# Dense architectures for use_liger auto. With use_liger true, any that liger-kernel supports,
# including experts.
AUTO_LIGER = frozenset(
    "gemma gemma2 gemma3_text glm4 granite llama mistral olmo2 olmo3 phi3 qwen2 qwen3 smollm3".split()
)


def compile_layers(built: BuiltModel, backend: str = "inductor") -> None:
    """Compile the `forward` of decoder layers, inside the hooks with which fully_shard all-gathers
    their weights. Layers of one kind share a graph, which is made in the first step. Not for
    generation: its key-value cache grows with every token.

    If ranks share sequences, the parts of a layer are compiled instead (norms, MLP, and attention
    before and after the exchange between ranks): no graph contains an exchange, and the graph of a
    checkpointed layer could not end at one.
    """
    model = built.model
    if built.mixers is not None and built.mixers.needs_scope:
        raise UserError(
            f"--compile: {type(model).__name__} computes packed samples one after another, which cannot be compiled.\n"
            "Use --batching_strategy padding, or remove --compile."
        )
    # Upper limit of graphs per model: {training, evaluation} x kinds of layer, and the first layer,
    # whose input may need no gradient. Beyond torch's own limit, 8, layers would run without a
    # graph.
    torch._dynamo.config.recompile_limit = 32
    torch.compiler.config.dynamic_sources = ",".join(VARYING_DIMENSIONS)
    layers = decoder_layers(model)
    kinds = _count_kinds(model, layers)
    compiled = torch.compile(_forward, backend=backend)
    if built.mixers is not None and built.mixers.sequence is not None:
        parts = [list(layer.children()) for layer in layers]
        graphs = _Graphs(compiled, kinds * (max(map(len, parts)) + 1))  # attention has two
        for layer, parts_of_layer in zip(layers, parts, strict=True):
            for part in parts_of_layer:
                replace_method(part, "forward", partial(graphs, part))
            replace_method(layer, "forward", partial(_forward_of_parts, layer))
    else:
        graphs = _Graphs(compiled, kinds)
        for layer in layers:
            replace_method(layer, "forward", partial(_forward_or_graph, layer, graphs))
    log.info(f"{len(layers)} decoder layers will be compiled at the first step.")


def _forward(layer: nn.Module, *args: Any, **keywords: Any) -> Any:
    # Not layer.forward: fully_shard replaces the class, and Transformers checkpoints only in the
    # last class's forward.
    return type(layer).forward(layer, *args, **keywords)


class _Graphs:
    """The compiled forward of all layers, which warns once if it makes more graphs than it should:
    each takes as long as the first step. For example, VARYING_DIMENSIONS may lack an argument that a
    new version of Transformers has renamed."""

    def __init__(self, compiled: Any, kinds: int) -> None:
        self._compiled = compiled
        self._kinds = kinds
        # {training, evaluation} x {adapter on, off}, and inputs that need no gradient
        self._expected = 4 * kinds + 4
        self._count = 0

    def __call__(self, layer: nn.Module, *args: Any, **keywords: Any) -> Any:
        before = counters["stats"]["unique_graphs"]
        output = self._compiled(layer, *args, **keywords)
        self._count += counters["stats"]["unique_graphs"] - before
        if self._count > self._expected:
            log.warning(
                f"--compile: {self._count} graphs were made for {plural(self._kinds, 'kind')} of layers, at most "
                f"{self._expected} are expected, and each takes time. TORCH_LOGS=recompiles logs the reasons."
            )
            self._expected = sys.maxsize
        return output


def _count_kinds(model: PreTrainedModel, layers: list[nn.Module]) -> int:
    """Return how many kinds of layers there are: of different modules, or of different attention."""
    names = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds = set()
    for name, layer in zip(names, layers, strict=False):
        kinds.add((name, *map(type, layer.modules())))
    return len(kinds)


def _forward_or_graph(layer: nn.Module, graphs: _Graphs, *args: Any, **keywords: Any) -> Any:
    run = _forward if has_cache(keywords) else graphs
    return run(layer, *args, **keywords)


def _forward_of_parts(layer: nn.Module, *args: Any, **keywords: Any) -> Any:
    eager = torch.compiler.set_stance("force_eager") if has_cache(keywords) else nullcontext()
    with eager:
        return _forward(layer, *args, **keywords)


def without_graphs(model: nn.Module) -> AbstractContextManager[Any]:
    """In the block, run layers without graphs: graphs for a few samples in evaluation mode would be
    used only once."""
    is_compiled = any(isinstance(layer.forward, partial) for layer in decoder_layers(model))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def choose_liger(
    setting: bool | Literal["auto"], config: PretrainedConfig, compiles: bool, target: Target
) -> tuple[bool, str]:
    """Return whether to use Liger's kernels, and a log text on fused kernels ("" on the CPU). Raises
    UserError if use_liger is true, but the model, the device or torch.compile does not allow it."""
    problem = _liger_problem(config, compiles, target, is_asked=setting is True)
    if setting is True and problem:
        raise UserError(
            f"--use_liger: {problem}.\n--use_liger false trains without Liger's kernels."
        )
    if setting is not False and not problem:
        return True, "Fused kernels: Liger's."
    if not target.is_cuda or compiles:
        return False, "Fused kernels: torch.compile's." if compiles else ""
    return False, f"Fused kernels: torch's RMSNorm, not Liger's: {problem or 'use_liger is false'}."


def _liger_problem(config: PretrainedConfig, compiles: bool, target: Target, is_asked: bool) -> str:
    """Return why Liger's kernels cannot replace a model's own; "" if they can."""
    if not target.is_cuda:
        return "Liger's kernels need CUDA"
    if compiles:
        return "--compile fuses the same operations"
    is_known = is_asked or config.model_type in AUTO_LIGER
    if is_known and find_spec("liger_kernel") is None:
        return 'liger-kernel, which makes steps shorter, is not installed: pip install -e ".[gpu]"'
    try:
        from liger_kernel.transformers import monkey_patch
    except Exception as error:  # also errors of Triton
        return f"liger-kernel cannot be imported ({reason(error)})"
    if config.model_type not in (
        monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN if is_asked else AUTO_LIGER
    ):
        return (
            f"{'liger-kernel' if is_asked else 'use_liger auto'} does not know {config.model_type}"
        )
    usual = type(config)()  # Liger assumes each architecture's default activation function
    names = [name for name in ("hidden_act", "hidden_activation") if hasattr(config, name)]
    for name in names:
        activation = getattr(config, name)
        if activation != getattr(usual, name, None):
            return f"liger-kernel has no {activation} for {config.model_type}"
    return ""


def fuse_layers(model: PreTrainedModel, settings: ModelConfig, train: TrainConfig) -> None:
    """Use Liger's kernels if they were chosen, and another RMSNorm for norms that compute the same as
    Llama's: torch's on CUDA, otherwise that of rms_norm.py. The model is on the meta device, without
    adapters. Layers that will be compiled are not changed."""
    report_missing_kernels(model)
    if settings.use_liger is True:
        _apply_liger(model, train)
    if settings.compile:
        return
    forward = _fused_rms_norm if current_target().is_cuda else rms_norm
    for module in model.modules():
        if "forward" not in vars(module) and _formula(type(module)) == _formula(LlamaRMSNorm):
            replace_method(module, "forward", partial(forward, module))


def _formula(kind: type[nn.Module]) -> Any:
    """Return the code of a norm without variable names, to compare it: a hundred classes repeat
    LlamaRMSNorm's code."""
    code = getattr(kind.forward, "__code__", None)
    return code and (code.co_code, code.co_names, code.co_consts)


def _fused_rms_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if hidden_states.dtype != norm.weight.dtype:  # the kernel needs equal dtypes
        return type(norm).forward(norm, hidden_states)
    return functional.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _apply_liger(model: PreTrainedModel, train: TrainConfig) -> None:
    from liger_kernel.transformers import monkey_patch

    # Liger rotates queries and keys in place. If selective activation checkpointing keeps them, the
    # recomputed layer would rotate them again, and gradients would be wrong without an error.
    # Liger's losses are not used: the loss here is a sum over loss tokens.
    kernels = {"rope": False} if train.activation_checkpointing == "selective" else {}
    monkey_patch._apply_liger_kernel_to_instance(
        model, cross_entropy=False, fused_linear_cross_entropy=False, **kernels
    )
