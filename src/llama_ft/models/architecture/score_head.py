"""Reward models: a decoder with a scalar head `score` in place of the LM head, in the layout of
Transformers' AutoModelForSequenceClassification with num_labels 1.

    hidden [tokens, width]  --last token of each sample-->  [samples, width]  --score [1, width]-->  scores [samples]

The last token is the last one that is not `pad_token_id`, as in Transformers' classes.
config.json's `architectures` tells such a model, and `choose_head` writes it there. A causal
model's LM head is left out, and the score head gets first values that depend on the seed alone:
the loader treats them as a tensor of the checkpoint.
"""

import hashlib
from functools import wraps
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from llama_ft.config.objectives import objectives_text
from llama_ft.errors import UserError
from llama_ft.models.architecture.text_part import names_score
from llama_ft.models.base.layers import SCORE, takes_more_than_text
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.base.source import StoredTensor, WeightSource

WEIGHT = f"{SCORE}.weight"
SCORING = objectives_text(lambda entry: entry.has_score)


def choose_head(config: PretrainedConfig, has_score: bool) -> None:
    """Note in a model's config that it gets a score head.

    Args:
        config: changed: its `architectures` and `num_labels`.
        has_score: false: the objective needs the LM head.

    Raises:
        UserError: the model has another head than it needs, or Transformers has no class with a
            score head for it.
    """
    named = (config.architectures or [config.model_type])[0]
    if not has_score:
        if names_score(config):
            raise UserError(
                f"{config.name_or_path or named}: {named} has a head for scores, and no LM head.\n"
                f"Use --objective {SCORING}, or the causal model that it was made from."
            )
        return
    scored = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if scored is None or takes_more_than_text(config):
        raise UserError(
            f"--objective {SCORING}: {named} (model_type {config.model_type}) is not supported. It needs a text "
            "model that Transformers loads with AutoModelForSequenceClassification."
        )
    config.architectures = [scored]
    config.num_labels = 1


def add_score(model: PreTrainedModel) -> None:
    """Have a skeleton return scores, float32 [samples], and its routers' logits (`router_logits`),
    if it is called with `positions`: where in the flattened micro-batch the last tokens are. No
    other position goes through the head.

    Raises:
        UserError: its class has no linear layer `score` with one output and no bias.
    """
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.startswith(f"{SCORE}.")
    }
    plain = model.forward
    if shapes != {WEIGHT: (1, model.config.get_text_config().hidden_size)}:
        raise UserError(
            f"--objective {SCORING}: {type(model).__name__} has no linear layer {SCORE} with one output."
        )

    @wraps(plain)
    def forward(
        *args: Any,
        positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if positions is None:
            return plain(*args, **kwargs)
        decoded = model.base_model(*args, **kwargs)
        every = decoded.last_hidden_state.flatten(0, 1)
        hidden = every.index_select(0, positions)  # [samples, width]
        head = getattr(model, SCORE)
        scores = head(hidden).squeeze(1).to(torch.float32, copy=True)
        return scores, getattr(decoded, "router_logits", None)

    replace_method(model, "forward", forward)


class ScoredSource(WeightSource):
    """A checkpoint, under the model's names, as one of a model that `add_score` has prepared. If it
    has no such head it is a causal model's: its LM head is left out, and the score head's values
    are drawn by `seed` from a normal distribution with the config's `initializer_range`, as in
    Transformers.
    """

    def __init__(self, source: WeightSource, model: PreTrainedModel, seed: int) -> None:
        self._source = source
        self._values = dict[str, torch.Tensor]()
        self.tensors = source.tensors
        if WEIGHT in source.tensors:
            return
        decoder = f"{model.base_model_prefix}."
        self.tensors = {
            name: header
            for name, header in source.tensors.items()
            if name.startswith(decoder) or header.is_untouched
        }
        weights = [
            header
            for header in self.tensors.values()
            if header.dtype.is_floating_point and not header.is_untouched
        ]
        largest = max(weights, key=lambda header: header.nbytes)
        config = model.config.get_text_config()
        shape = (1, config.hidden_size)
        self.tensors[WEIGHT] = StoredTensor(largest.file, shape, largest.dtype)
        # A seed per tensor, like those of an adapter (lora.first_values). manual_seed takes 64 bits.
        digest = hashlib.sha256(f"{seed}/{WEIGHT}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        deviation = getattr(config, "initializer_range", 0.02)
        values = torch.randn(shape, generator=generator) * deviation
        self._values[WEIGHT] = values.to(largest.dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        if name in self._values:
            return self._values[name][start:stop]
        return self._source.read_rows(name, start, stop)
