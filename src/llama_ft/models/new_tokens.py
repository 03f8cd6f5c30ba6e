"""Rows of embedding and head for tokens the model lacks: where the first ones come from, and how LoRA trains them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.models.quantized import QuantizedLinear
from llama_ft.models.source import WeightSource, blocks


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a model is to learn."""

    ids: list[int]  # ascending
    stored_rows: int  # of the model's embedding as it is stored
    rows: int  # that it needs: more, unless all of the tokens have one of the model's spare rows


class GrownSource(WeightSource):
    """Another source's tensors; those in `names` that have `stored_rows` rows grow to `rows`. Each new row is the mean
    of the stored ones, in their dtype: new tokens begin with about the probability of an average one, and those of the
    others hardly change. Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html
    """

    def __init__(self, source: WeightSource, names: Sequence[str], stored_rows: int, rows: int) -> None:
        self._source, self._stored_rows = source, stored_rows
        headers = {name: source.tensors[name] for name in names if name in source.tensors}
        grown = {name: it for name, it in headers.items() if it.shape[:1] == (stored_rows,)}
        self.tensors = source.tensors | {n: replace(it, shape=(rows, *it.shape[1:])) for n, it in grown.items()}
        self._means: dict[str, torch.Tensor | None] = dict.fromkeys(grown)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) in the stored dtype. The first new row reads the whole tensor once, in blocks."""
        stored = self._stored_rows
        if name not in self._means or stop <= stored:
            return self._source.read_rows(name, start, stop)
        added = self._mean(name).expand(stop - max(start, stored), *self.tensors[name].shape[1:])
        return torch.cat([self._source.read_rows(name, start, stored), added]) if start < stored else added

    def _mean(self, name: str) -> torch.Tensor:
        mean = self._means[name]
        if mean is None:
            # fp64: neither the size of a block nor the number of threads shows in the result.
            total = sum(block.sum(dim=0, dtype=torch.float64) for block in blocks(self._source, name))
            self._means[name] = mean = (torch.as_tensor(total) / self._stored_rows).to(self.tensors[name].dtype)
        return mean


def note_growth(model: PreTrainedModel, new: NewTokens) -> None:
    """Leave on a skeleton that has rows for new tokens which of its parameters have fewer in the checkpoint."""
    modules = {model.get_input_embeddings(), model.get_output_embeddings()}
    found = [(prefix, module) for prefix, module in model.named_modules() if module in modules]
    names = [f"{prefix}.{name}" for prefix, module in found for name, _ in module.named_parameters()]
    model._grown = (names, new.stored_rows, new.rows)  # type: ignore[assignment]


def grow(
    source: WeightSource, model: PreTrainedModel, rename: Callable[[str], str | None] = lambda name: name
) -> WeightSource:
    """A checkpoint as one of a grown skeleton; any other model's as it is. `rename` gives the name in `source` of a
    tensor of the model."""
    growth: tuple[list[str], int, int] | None = getattr(model, "_grown", None)
    if growth is None:
        return source
    names, stored_rows, rows = growth
    return GrownSource(source, [renamed for name in names if (renamed := rename(name))], stored_rows, rows)


class TokenRows(TrainableTokensLayer):
    """peft's layer: an embedding or a head some of whose rows are replaced by trained ones. peft's forward copies the
    whole weight to put the rows in, and so makes a gradient of the whole weight: of a head of 128,256 x 4,096 in bf16
    1 GiB each. Here the base computes as it is, and what the trained rows give goes in the place of what theirs gave.
    """

    _slots: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base, rows = self.base_layer, self.trainable_tokens_delta["default"]
        ids = self.token_indices["default"]
        if self._slots is None or self._slots.device != x.device:
            # Of the embedding: token id -> place among the trained rows, or -1. Of the head: the ids.
            slots = torch.tensor(ids)
            if isinstance(base, nn.Embedding):
                slots = torch.full((base.num_embeddings,), -1).index_copy_(0, slots, torch.arange(len(ids)))
            self._slots = slots.to(x.device)
        if not isinstance(base, nn.Embedding):
            logits: torch.Tensor = base(x)  # [..., vocab]
            return logits.index_copy_(-1, self._slots, F.linear(x, rows))
        slot = self._slots[x]  # [batch, length]
        trained = F.embedding(slot.clamp(min=0), rows)  # [batch, length, width]
        if (scale := self._get_embed_scale()) is not None:
            trained = trained * scale.to(trained.dtype)
        return torch.where((slot < 0).unsqueeze(-1), base(x), trained)


def use_token_rows(model: nn.Module) -> None:
    """Give peft's layers the forward above; a UserError if the rows of a head cannot be trained by themselves."""
    for name, layer in model.named_modules():
        if type(layer) is TrainableTokensLayer:
            head, base = name.removesuffix(".token_adapter"), layer.base_layer
            if isinstance(base, QuantizedLinear) or getattr(base, "bias", None) is not None:
                raise UserError(f"--resize_embeddings: {head}, quantized or with a bias, cannot train new tokens.")
            layer.trainable_tokens_original.clear()  # for unmerging, which is not done here
            layer.__class__ = TokenRows
