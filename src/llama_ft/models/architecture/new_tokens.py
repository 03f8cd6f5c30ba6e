"""New tokens: their rows in the embedding and the LM head, their initial values, and LoRA for
them."""

from dataclasses import replace

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.models.base.replaced import become
from llama_ft.models.base.source import WeightSource, blocks
from llama_ft.models.built import GrownRows, NewTokens
from llama_ft.models.quantization.layers import QuantizedLinear


class GrownSource(WeightSource):
    """The tensors of another source, where some grow from `stored_rows` to `rows` rows.
    Each new row is the mean of the stored ones, in their dtype. So a new token starts with about
    the probability of an average token, and the other probabilities hardly change. Source:
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html
    """

    def __init__(self, source: WeightSource, growth: GrownRows) -> None:
        self._source = source
        self._stored_rows = growth.stored_rows
        headers = {name: source.tensors[name] for name in growth.names if name in source.tensors}
        # name -> mean of the stored rows, once it is computed
        self._means: dict[str, torch.Tensor | None] = {}
        self.tensors = dict(source.tensors)
        for name, header in headers.items():
            if header.shape[:1] == (self._stored_rows,):
                shape = (growth.rows, *header.shape[1:])
                self.tensors[name] = replace(header, shape=shape)
                self._means[name] = None

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) in the stored dtype. The first new row reads the whole tensor
        once, in blocks."""
        stored = self._stored_rows
        if name not in self._means or stop <= stored:
            return self._source.read_rows(name, start, stop)
        first_new = max(start, stored)
        row_shape = self.tensors[name].shape[1:]
        added = self._mean(name).expand(stop - first_new, *row_shape)
        if start >= stored:
            return added
        return torch.cat([self._source.read_rows(name, start, stored), added])

    def _mean(self, name: str) -> torch.Tensor:
        mean = self._means[name]
        if mean is None:
            # fp64: the result must not depend on the block size or the number of threads.
            total: torch.Tensor | int = 0
            for block in blocks(self._source, name):
                total += block.sum(dim=0, dtype=torch.float64)
            mean_fp64 = torch.as_tensor(total) / self._stored_rows
            mean = mean_fp64.to(self.tensors[name].dtype)
            self._means[name] = mean
        return mean


def find_growth(model: PreTrainedModel, new: NewTokens | None) -> GrownRows | None:
    """Return which parameters of a model with rows for new tokens have fewer rows in the
    checkpoint; None if there are none."""
    if new is None or new.rows <= new.stored_rows:
        return None
    modules = {model.get_input_embeddings(), model.get_output_embeddings()}
    layers = [(prefix, module) for prefix, module in model.named_modules() if module in modules]
    names = []
    for prefix, module in layers:
        names += [f"{prefix}.{name}" for name, _ in module.named_parameters()]
    return GrownRows(names, new.stored_rows, new.rows)


class TokenRows(TrainableTokensLayer):
    """PEFT's layer for an embedding or LM head with some trained rows. PEFT's forward copies the
    whole weight to insert them, and so computes a gradient of it: for an LM head of 128,256 x 4,096
    in bf16, 1 GiB each. Here the base layer computes as usual, and the outputs of the trained rows
    replace those of its rows.
    """

    _slots: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base_layer
        rows = self.trainable_tokens_delta["default"]
        ids = self.token_indices["default"]
        if self._slots is None or self._slots.device != x.device:
            # For the embedding: token id -> index of its trained row, or -1. For the LM head: the
            # ids.
            slots = torch.tensor(ids)
            if isinstance(base, nn.Embedding):
                slots = torch.full((base.num_embeddings,), -1).index_copy_(
                    0, slots, torch.arange(len(ids))
                )
            self._slots = slots.to(x.device)
        if not isinstance(base, nn.Embedding):
            logits: torch.Tensor = base(x)  # [..., vocab]
            return logits.index_copy_(-1, self._slots, F.linear(x, rows))
        slot = self._slots[x]  # [batch, length]
        trained = F.embedding(slot.clamp(min=0), rows)  # [batch, length, width]
        scale = self._get_embed_scale()  # Gemma's embeddings multiply by it
        if scale is not None:
            trained = trained * scale.to(trained.dtype)
        return torch.where((slot < 0).unsqueeze(-1), base(x), trained)


def use_token_rows(model: nn.Module) -> None:
    """Use `TokenRows` for PEFT's layers. Raises UserError if single rows of an LM head cannot be
    trained."""
    for name, layer in model.named_modules():
        if type(layer) is TrainableTokensLayer:
            head = name.removesuffix(".token_adapter")
            base = layer.base_layer
            if isinstance(base, QuantizedLinear) or getattr(base, "bias", None) is not None:
                raise UserError(
                    f"--resize_embeddings: {head}, quantized or with a bias, cannot train new tokens."
                )
            layer.trainable_tokens_original.clear()  # PEFT keeps it for unmerging
            become(layer, TokenRows)
