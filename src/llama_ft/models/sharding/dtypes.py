"""The dtypes of a model's weights and buffers, and the parts that stay in fp32 while the rest
computes in 16 bits."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from llama_ft.libraries.evidence import FP32_KERNELS
from llama_ft.libraries.transformers_private import private
from llama_ft.models.base.layers import reads
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.quantization.layers import QuantizedStacks
from llama_ft.runtime.devices import Precision


def set_storage_dtypes(model: nn.Module, precision: Precision) -> None:
    """Set the storage dtype of each parameter on the meta device; it may differ between trained and
    frozen ones. Quantized stacks are dequantized to the compute dtype.

    Matrices among the stored buffers (MiniMax's decays) and masks (of the first GPT) have the
    compute dtype, in which they are multiplied, as Transformers loads them. Other buffers stay in
    fp32: corrections of routing, and tables of positions.
    """
    for module in model.modules():
        if isinstance(module, QuantizedStacks):
            module.dtype = precision.compute
        for name, buffer in module.named_buffers(recurse=False):
            is_stored = name not in module._non_persistent_buffers_set and buffer.ndim > 1
            is_mask = buffer.ndim == 4 and buffer.shape[:2] == (1, 1)  # [1, 1, tokens, tokens]
            if buffer.is_floating_point() and (is_stored or is_mask):
                module._buffers[name] = buffer.to(precision.compute)
    for parameter in model.parameters():
        if parameter.is_floating_point():  # quantized weights are integers
            dtype = precision.trained if parameter.requires_grad else precision.frozen
            # .data: the parameter object stays, and with it ties of embedding and LM head
            parameter.data = parameter.data.to(dtype)
    for module in fp32_modules(model, precision.compute):
        module.float()
    if precision.compute != torch.float32:
        _use_fp32_kernels(model)


def fp32_modules(model: nn.Module, compute: torch.dtype) -> list[nn.Module]:
    """Return the modules whose weights stay in fp32 although the model computes in `compute`, as
    Transformers does: outermost ones, with a matrix. Their code expects it: Inkling 2's router
    multiplies fp32 activations with its weight.

    Vectors, and matrices that another module reads, are in `compute` dtype like the weights around
    them: only a module that is called can be an FSDP unit of its own, and so have another dtype.
    """
    names = set[str]()
    if compute != torch.float32:
        names |= set(private(model, "_keep_in_fp32_modules_strict") or ())
    if compute == torch.float16:
        names |= set(private(model, "_keep_in_fp32_modules") or ())
    if not names:
        return []
    pattern = re.compile("|".join(name.replace("*", ".*") for name in names))
    modules = list[nn.Module]()

    def visit(owner: nn.Module, prefix: str) -> None:
        for name, child in owner.named_children():
            if isinstance(child, BaseTunerLayer):
                continue
            weights = dict(child.named_parameters(prefix=f"{prefix}{name}"))
            has_matrix = any(weight.ndim == 2 for weight in weights.values())
            own = [weight for weight, _ in child.named_parameters(recurse=False)]
            is_called = hasattr(type(child), "forward") and not reads(owner, name, own)
            is_kept = all(pattern.search(weight) for weight in weights)
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if has_matrix and is_kept and is_called and not is_container:
                modules.append(child)
            else:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return modules


def _use_fp32_kernels(model: nn.Module) -> None:
    """Make the modules of FP32_KERNELS compute in fp32, and return their first result in the dtype
    of their inputs."""
    for module in model.modules():
        if type(module).__name__ in FP32_KERNELS:
            replace_method(module, "forward", partial(_in_fp32, module.forward))


def _in_fp32(forward: Callable[..., Any], **inputs: torch.Tensor | None) -> Any:
    dtypes = {tensor.dtype for tensor in inputs.values() if tensor is not None}
    (dtype,) = dtypes - {torch.float32} or {torch.float32}
    wide = dict[str, torch.Tensor | None]()
    for name, tensor in inputs.items():
        wide[name] = None if tensor is None else tensor.float()
    first, *others = forward(**wide)
    return first.to(dtype), *others
