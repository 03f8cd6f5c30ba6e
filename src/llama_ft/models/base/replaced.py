"""Change how a module of another library computes: by another class, by another method, or by
another value of a weight.

These are the only assignments to modules of other libraries, apart from values of attributes that
those libraries define. Everything else about a model is in `BuiltModel`.

Hooks come first: they add to what a module computes. A module is changed only where hooks are not
enough, for three reasons:

- Its own computation must not run at all, such as logits of a whole micro-batch, or attention
  across packed samples.
- The change must run inside the hooks with which fully_shard all-gathers weights. A module around
  the changed one would be outside of them, and would rename parameters, adapters and checkpoints.
- Transformers and PEFT create their modules themselves, and offer no choice of a class.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make a module an instance of `kind`, a subclass of its class. Parameters, hooks and names
    stay. fully_shard changes classes in the same way."""
    assert issubclass(kind, type(module))
    module.__class__ = kind


def replace_method(
    module: nn.Module,
    name: str,
    method: Callable[..., Any],
) -> None:
    """Let this module alone, not others of its class, run `method` in place of its method
    `name`, mostly `forward`. The hooks of the module run around it as before."""
    assert callable(getattr(module, name))
    setattr(module, name, method)


@contextmanager
def reads_as(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """In the block, the module reads `value` as its parameter `name`, which stays where it is.
    Transformers' experts read their weights themselves, and multiply in one of several functions."""
    vars(module)[name] = value  # found before parameters, which torch looks up only in their dict
    try:
        yield
    finally:
        del vars(module)[name]


@contextmanager
def weights_stay_tied(model: PreTrainedModel) -> Iterator[None]:
    """In the block, the model's `tie_weights` does nothing. Weights are already tied, and
    Transformers' method fails if an adapter wraps the embedding or the LM head."""
    replace_method(model, "tie_weights", lambda *_, **__: None)
    try:
        yield
    finally:
        del vars(model)["tie_weights"]
