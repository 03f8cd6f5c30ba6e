"""The layers of a model, and what their code reads: by names of modules and by source code, since
architectures differ."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from llama_ft.libraries.transformers_private import private

SCORE = "score"  # name of a reward model's head


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers from input to output. Their classes are named in Transformers'
    `_no_split_modules`; of nested ones (Mamba's) the outermost count. Without such names, they are
    the items of the list with the most parameters. fully_shard replaces their classes by
    subclasses."""
    kinds = set(private(model, "_no_split_modules") or ())
    modules = dict(model.named_modules())
    candidates = dict[str, nn.Module]()
    for name, module in modules.items():
        names = [kind.__name__ for kind in type(module).__mro__]
        # BERT's embeddings are named there, too
        has_embedding = any(isinstance(child, nn.Embedding) for child in module.children())
        if not kinds.isdisjoint(names) and not has_embedding:
            candidates[name] = module

    def is_nested(name: str) -> bool:
        return any(name.startswith(f"{outer}.") for outer in candidates)

    layers = [module for name, module in candidates.items() if not is_nested(name)]
    if layers:
        return _of_text(model, layers)
    lists = [module for module in modules.values() if isinstance(module, nn.ModuleList)]

    def item_parameters(items: nn.ModuleList) -> int:
        total = 0
        for item in items:
            total += sum(parameter.numel() for parameter in item.parameters())
        return total

    return list(max(lists, key=item_parameters, default=[]))


def _of_text(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the layers of the text decoder: towers of a multimodal model have layers, too."""
    if not isinstance(model, PreTrainedModel) or not takes_more_than_text(model.config):
        return layers
    inside = set(model.get_decoder().modules())
    return [layer for layer in layers if layer in inside] or layers


def read_linears(model: nn.Module) -> set[nn.Module]:
    """Return linear layers whose weight is read by the module around them instead of being called:
    Mamba's kernels read out_proj's weight, LongCat's router its classifier's. An adapter of such a
    layer would have no effect."""
    linears = set[nn.Module]()
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and reads(module, name, ["weight"]):
                linears.add(child)
    return linears


def reads(module: nn.Module, child: str, parameters: Iterable[str]) -> bool:
    """Return whether a module's code reads one of the parameters of its child, other than its dtype,
    device or shape."""
    names = "|".join(parameters)
    read = re.compile(rf"self\.{child}\.({names})\b(?!\.(dtype|device|shape)|\[|, torch)")
    kind: Any
    for kind in type(module).__mro__:
        if issubclass(kind, nn.Module) and read.search(_source_of(kind)):
            return True
    return False


@cache
def _source_of(kind: Any) -> str:
    """Return the source code of a model's class; "" for classes of torch, or without a file."""
    with suppress(OSError, TypeError):
        return "" if kind.__module__.startswith("torch.") else inspect.getsource(kind)
    return ""


def function_of_file(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a function of the file that defines a module's class (not the subclass that
    fully_shard derives)."""
    files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    functions = (getattr(file, name) for file in files if hasattr(file, name))
    return cast(Callable[..., Any], next(functions))


def architecture_of(module: nn.Module) -> str:
    """Return the name of the architecture in Transformers whose file defines a module's class, such as
    "qwen3_vl" (not the subclass that fully_shard derives); "" for code of others."""
    files = [kind.__module__ for kind in type(module).__mro__]
    matches = [re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\w+", file) for file in files]
    return next((match[1] for match in matches if match), "")


def takes_more_than_text(config: PretrainedConfig) -> bool:
    """Return whether a config belongs to a model for images or sound, too. Phi-4-multimodal has no
    text_config."""
    has_towers = any(key.startswith(("vision", "audio")) for key in config.sub_configs)
    return has_towers or config.get_text_config() is not config
