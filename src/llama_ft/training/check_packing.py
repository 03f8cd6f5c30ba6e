"""Check by computation, not by the model's name, that packed samples do not attend to each
other."""

import inspect
import math
import re
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import IGNORED, Batch, Media, collate
from llama_ft.errors import UserError, reason
from llama_ft.models import BuiltModel, without_graphs
from llama_ft.models.packing.rope import longrope_lengths
from llama_ft.models.quantization.layers import QuantizedLinear
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.models.sharding.kept_units import units_kept_if_they_fit
from llama_ft.runtime import Ranks, log
from llama_ft.training.objectives.base import ModelCall, model_call

COMPARED_SAMPLES = 3
TOKENS = 16  # per sample: enough to see a difference, and cheap
# settings of how many tokens a layer sees at a time
SPAN = re.compile("sliding_window|chunk_size|index_topk")
# Mean difference of logits over their standard deviation. Samples that see each other, or positions
# that do not restart, differ by 0.3 or more. Rounding to 16 bits, or int8 with a scale over both
# samples, differs by about 0.01.
TOLERANCE_FP32 = 1e-3
TOLERANCE_ROUNDED = 0.05
TOLERANCE_LOSS = 0.01  # of a sum over about fifty targets, with logits rounded to 16 bits
# number of a sample, and some of its positions, int64 [positions]
Segment = tuple[int, torch.Tensor]


@torch.no_grad()
def check_packing(
    built: BuiltModel,
    samples: Dataset,
    longest: int,
    dtype: torch.dtype,
    ranks: Ranks,
    media: Media | None = None,
) -> bool:
    """Compare the logits of a few packed samples with those of each sample alone by Transformers'
    own attention. If they differ, run more of the model sample by sample. Return whether the model
    has a chunked loss that is the loss of all logits.

    Args:
        built: the loaded model in training mode. All ranks must call it.
        samples: tokenized samples; the first few are used.
        longest: maximum number of tokens of a sample.
        dtype: the model's compute dtype.
        ranks: the ranks.
        media: makes tensors of what is not text; None: all samples are text.

    Raises:
        UserError: logits differ by more than rounding, even if each layer computes sample by
            sample; packed samples cannot be computed; or logits are not finite, or all equal.
    """
    compared: ComparedSamples = _TextSamples(built, samples, longest, ranks.device)
    if media is not None:
        compared = media.samples_to_compare(built, samples, ranks.device)
    built.model.eval()
    with units_kept_if_they_fit(built, ranks):  # it calls the model five times or more
        has_chunked_loss = _compare(built, compared, dtype, ranks.device)
    free_unsharded(built.model)
    built.model.train()
    return has_chunked_loss


def _compare(
    built: BuiltModel, compared: "ComparedSamples", dtype: torch.dtype, device: torch.device
) -> bool:
    """Compare these samples as described in `check_packing`, with a model in evaluation mode."""
    model = built.model
    mixers = built.mixers
    assert mixers is not None
    packed_batch = compared.packed()
    positions = _in_sequence(compared.segments, compared.lengths)
    for mixer in mixers.with_kernels:
        # Mamba has other kernels for training; dropout is in a child and stays off
        mixer.training = True
    attention = mixers.config._attn_implementation
    # that of Transformers
    mixers.config._attn_implementation = (attention or "").removeprefix("packed_") or None
    alone = []
    for number, compared_positions in compared.segments:
        alone.append(_logits(built, compared.alone(number), compared_positions.to(device)))
    mixers.config._attn_implementation = attention
    _check_values(built, alone)
    is_quantized = any(isinstance(module, QuantizedLinear) for module in model.modules())
    is_exact = dtype == torch.float32 and not is_quantized
    tolerance = TOLERANCE_FP32 if is_exact else TOLERANCE_ROUNDED
    while True:
        call = model_call(built, packed_batch, device)
        packed = _packed_logits(built, call, positions)
        difference = _largest_difference(packed, alone)
        if difference <= tolerance:
            break
        problem = (
            f"{type(model).__name__} does not keep packed samples apart (logits differ by "
            f"{difference:.0%} of their standard deviation)"
        )
        if not mixers.run_more_per_sample():
            raise call.own.unsupported(problem)
        log.info(f"{problem}: {mixers.names()} compute one sample after another.")
    return _has_exact_chunked_loss(built, call, packed_batch, positions, packed)


class ComparedSamples(Protocol):
    """A few samples, and what the model is called with for them.

    Attributes:
        lengths: tokens of each sample.
        segments: what is compared: number of a sample, and some of its positions, int64 [positions].
    """

    lengths: list[int]
    segments: list[Segment]

    def alone(self, number: int) -> dict[str, Any]:
        """Return the arguments for one sample."""

    def packed(self) -> Batch:
        """Return all samples in one sequence."""


class _TextSamples:
    """The first tokens of a few samples: `ComparedSamples`.

    Args:
        built: the model.
        samples: tokenized samples.
        longest: maximum number of tokens of a sample.
        device: where the model computes.
    """

    def __init__(
        self, built: BuiltModel, samples: Dataset, longest: int, device: torch.device
    ) -> None:
        self._prompts = _samples_to_compare(built.model, samples, longest)
        self._device = device
        self.lengths = [len(prompt) for prompt in self._prompts]
        self.segments: list[Segment] = []
        for number, length in enumerate(self.lengths):
            self.segments.append((number, last_positions(length)))

    def alone(self, number: int) -> dict[str, Any]:
        """Return the arguments for one sample."""
        input_ids = self._prompts[number].unsqueeze(0).to(self._device)
        mask = torch.ones_like(input_ids)
        return {"input_ids": input_ids, "use_cache": False, "attention_mask": mask}

    def packed(self) -> Batch:
        """Return all samples in one sequence."""
        input_ids = torch.cat(self._prompts).unsqueeze(0)
        labels = torch.full_like(input_ids, IGNORED)
        locations = [""] * len(self.lengths)
        return Batch(input_ids, labels, self.lengths, is_packed=True, locations=locations)


def _packed_logits(built: BuiltModel, call: ModelCall, positions: torch.Tensor) -> torch.Tensor:
    """Return `_logits` of packed samples. An error of the model's code becomes a UserError."""
    at = call.own.find(positions, call.inputs["input_ids"].device)
    try:
        # one position more, so that no rank has none
        own = _logits(built, call.inputs, F.pad(at.positions, (0, 1)))
        return at.all(own[:-1])
    except (torch.OutOfMemoryError, torch.distributed.DistError, UserError):
        raise
    except Exception as error:  # of the model's own code, which computes each sample alone
        name = type(built.model).__name__
        problem = f"{name} cannot compute packed samples ({reason(error)})"
        raise call.own.unsupported(problem) from error


def _largest_difference(packed: torch.Tensor, alone: list[torch.Tensor]) -> float:
    """Return the largest mean difference of a part's logits, over their standard deviation."""
    packed_segments = packed.split([len(logits) for logits in alone])
    differences = []
    for expected, output in zip(alone, packed_segments, strict=True):
        difference = (output - expected).abs().mean() / expected.std()
        differences.append(difference.item())
    return max(differences)


def _has_exact_chunked_loss(
    built: BuiltModel,
    call: ModelCall,
    batch: Batch,
    positions: torch.Tensor,
    packed: torch.Tensor,
) -> bool:
    """Return whether there is a chunked loss, and it is that of the logits of packed samples, float32
    [positions, vocab]. `call` is for `batch`."""
    model = built.model
    if not built.has_chunked_loss:
        return False
    at = call.own.find(positions, packed.device)
    targets = batch.input_ids[0].roll(-1)[positions]  # any tokens would do
    own_targets = at.own(targets.to(packed.device))
    with without_graphs(model):
        loss = model(**call.inputs, positions=at.positions, targets=own_targets)[0]
    of_logits_sum = F.cross_entropy(at.own(packed), own_targets, reduction="sum")
    losses = at.summed(torch.stack([loss, of_logits_sum]))
    chunked, of_logits = losses.tolist()
    is_equal = math.isclose(chunked, of_logits, rel_tol=TOLERANCE_LOSS)
    if not is_equal:
        log.warning(
            f"Chunked cross-entropy is off, which takes more memory: with {type(model).__name__} it gives "
            f"{chunked:g}, and the full logits give {of_logits:g}."
        )
    return is_equal


def _check_values(built: BuiltModel, alone: list[torch.Tensor]) -> None:
    """Raise UserError if the logits of samples alone are not finite, or all the same. Packing is not
    the cause, and nothing could be compared."""
    origin = f"--model_name: on the first samples, the logits of {type(built.model).__name__}"
    advice = "Check the weights (and the adapter, if there is one) and config.json."
    are_finite = all(bool(logits.isfinite().all()) for logits in alone)
    if not are_finite:
        raise UserError(f"{origin} are NaN or infinite.\n{advice}")
    spreads = [(logits.max() - logits.min()).item() for logits in alone]
    if 0 in spreads and not built.has_score:
        raise UserError(f"{origin} are all equal: its weights are zero.\n{advice}")


def _samples_to_compare(
    model: PreTrainedModel, samples: Dataset, longest: int
) -> list[torch.Tensor]:
    """Return the first tokens of a few samples. The first sample is repeated until it exceeds a
    layer's window, or the original length of longrope."""
    count = min(COMPARED_SAMPLES, len(samples))
    batch = collate(samples, range(count), pad_token_id=0)
    whole = [ids for ids, _ in batch.examples()]
    beginnings = [ids[:TOKENS] for ids in whole]
    settings = vars(model.config.get_text_config())
    spans = [value for name, value in settings.items() if SPAN.search(name)]
    # A longer sample must not change the factors of the others.
    spans += longrope_lengths(model)
    # Phi-MoE has its window only in the mask, which packed sequences do not use.
    shorter = [span for span in spans if isinstance(span, int) and 0 < span < longest]
    if shorter:
        ids = torch.cat(whole)
        length = min(max(shorter) + TOKENS, longest)
        repeats = math.ceil(length / len(ids))
        beginnings[0] = ids.repeat(repeats)[:length]
    return beginnings


def last_positions(length: int) -> torch.Tensor:
    """Return the last few positions of a sample."""
    return torch.arange(length - min(length, TOKENS), length)


def _in_sequence(segments: list[Segment], lengths: list[int]) -> torch.Tensor:
    """Return the positions of segments of samples in the packed sequence. `lengths`: of all samples."""
    moved = [positions + sum(lengths[:number]) for number, positions in segments]
    return torch.cat(moved)


def _logits(built: BuiltModel, inputs: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Return float32 [positions, vocab], or scores [positions, 1], of a few tokens of each sample.
    Those of a whole window of tokens would take gigabytes."""
    model = built.model
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    if can_keep:
        inputs = {**inputs, "logits_to_keep": positions}
    with without_graphs(model):
        if built.has_score:
            scores: torch.Tensor = model(**inputs, positions=positions)[0]
            return scores.unsqueeze(1)
        logits: torch.Tensor = model(**inputs).logits
    return (logits[0] if can_keep else logits[0, positions]).float()
