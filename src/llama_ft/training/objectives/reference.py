"""The reference of a policy: another model's log-probabilities of the same tokens.

With a new adapter the reference is the model with its adapter off, computed in each step unless
--precompute_ref_log_probs. Otherwise its log-probabilities are computed once before training, so that
no second model is in memory: by the model itself if all weights are trained or an adapter is
continued, or by --reference_model.

    examples of all samples  --forward, shared by the ranks-->  one number each  -->  reference.safetensors

An example is found by a hash of its tokens and labels, in any micro-batch of any epoch, packed or
padded, on any rank.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy
import safetensors.torch
import torch
import xxhash
from safetensors import safe_open

from llama_ft import models
from llama_ft.config import Config, needs_first_pass
from llama_ft.config.objectives import REFERENCE
from llama_ft.data import (
    Batch,
    evaluation_batches,
    example_lengths,
    group_size,
)
from llama_ft.data.read.media import KIND
from llama_ft.errors import RunFailure, UserError, plural, reason
from llama_ft.models import BuiltModel
from llama_ft.models.adapters.lora import adapter_off
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.phases import PhaseMonitor
from llama_ft.runtime import Ranks, log, sent
from llama_ft.training.objectives.base import example_log_probabilities, target_losses
from llama_ft.training.objectives.first_pass import FirstPass, PassInputs

SECONDS_BETWEEN_LINES = 30.0
# tensors of the file
KEYS = "reference.keys"
SUMS = "reference.log_probabilities"
# The only text in the file's header, as JSON: with two, safetensors writes them in a random order.
DESCRIPTION = "description"
FINGERPRINT = "fingerprint"  # everything that determines the numbers
CHECKSUM = "checksum"  # of the tensors and the fingerprint


class Reference(Protocol):
    """Interface of the reference's log-probabilities."""

    def log_probabilities(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> torch.Tensor:
        """Return sums over the targets of each example, float32 [examples] on the device, without
        gradient. `built` is the policy. All ranks must call it."""


class AdapterOff:
    """The model with its adapter off. It is computed in each step, and needs no additional memory
    for weights."""

    def log_probabilities(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> torch.Tensor:
        """See `Reference`."""
        with adapter_off(built.model):
            return score_examples(built, batch, ranks)


def build_reference(config: Config) -> Reference:
    """Return the reference of a run. A stored one is filled before training."""
    return StoredReference() if needs_first_pass(config) else AdapterOff()


def reference_pass(config: Config, reference: Reference | None) -> "ReferencePass | None":
    """Return the pass that fills a reference, if it is stored."""
    if isinstance(reference, StoredReference):
        return ReferencePass(config, reference)
    return None


@torch.no_grad()
def score_examples(built: BuiltModel, batch: Batch, ranks: Ranks) -> torch.Tensor:
    """Return the model's log-probability of the targets of each example, float32 [examples],
    without dropout or gradient."""
    model = built.model
    is_training = model.training
    model.eval()
    computed = target_losses(built, batch, ranks.device, per_token=True)
    model.train(is_training)
    return example_log_probabilities(computed.losses, batch)


def example_keys(batch: Batch) -> numpy.ndarray:
    """Return a hash of each example's tokens, labels and media, int64 [examples], without the filler
    of a batch that has no sample or no media. Among a million different examples, two have the same
    hash with a probability of 3e-8."""
    count = len(batch.locations)
    media = [b""] * count
    if batch.media is not None:
        media = batch.media.checksums[:count]
    keys = []
    for (ids, labels), checksums in zip(batch.examples()[:count], media, strict=True):
        keys.append(example_key(ids.numpy(), labels.numpy(), checksums))
    return numpy.array(keys, numpy.int64)


def example_key(input_ids: numpy.ndarray, labels: numpy.ndarray, media: bytes = b"") -> int:
    """Return a hash of the tokens and labels of an example, both int64 [tokens], and of the checksums
    of its media. The first label is not hashed: no position predicts it."""
    content = input_ids.tobytes() + labels[1:].tobytes() + media
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def find_examples(sorted_keys: numpy.ndarray, batch: Batch, failure: str) -> numpy.ndarray:
    """Return the index of the key of each example of a batch, see `example_keys`, among sorted keys.
    Raises RunFailure with `failure` and the sample's place if one is missing."""
    keys = example_keys(batch)
    # Without the last key, the result is at most the last index, also for larger keys.
    indices = numpy.searchsorted(sorted_keys[:-1], keys)
    is_missing = sorted_keys[indices] != keys
    if is_missing.any():
        sample = batch.locations[int(is_missing.argmax())]  # the first one
        raise RunFailure(f"{sample}: {failure}")
    return indices


class StoredReference:
    """Log-probabilities of examples from `compute` or `load`: 12 bytes per example, on every
    rank.

    Attributes:
        is_planned: nothing is stored, because this is a plan: they are computed in each step.
    """

    def __init__(self) -> None:
        self.is_planned = False
        # sorted by key
        self._keys = numpy.zeros(1, numpy.int64)
        self._sums = numpy.zeros(1, numpy.float32)

    def __len__(self) -> int:
        return len(self._keys)

    def log_probabilities(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> torch.Tensor:
        """See `Reference`. Raises RunFailure if an example was not scored before."""
        if self.is_planned:
            return AdapterOff().log_probabilities(built, batch, ranks)
        failure = "the reference's log-probability of this sample was not computed before training."
        indices = find_examples(self._keys, batch, failure)
        sums = numpy.zeros(len(batch.example_lengths), numpy.float32)  # 0 of a filler
        sums[: len(indices)] = self._sums[indices]
        return sent(torch.from_numpy(sums), ranks.device)

    def compute(self, built: BuiltModel, batches: Iterable[Batch], ranks: Ranks) -> None:
        """Score the examples of this rank's micro-batches; every rank has the same number. All ranks
        get all numbers."""
        keys = [numpy.zeros(0, numpy.int64)]
        sums = [torch.zeros(0)]
        logged = time.monotonic()
        for batch in batches:
            scores = score_examples(built, batch, ranks)
            of_samples = example_keys(batch)
            keys.append(of_samples)
            sums.append(scores[: len(of_samples)].cpu())
            if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
                logged = time.monotonic()
                count = sum(len(batch_keys) for batch_keys in keys)
                log.info(f"reference: {plural(count, 'example')} on this rank")
        free_unsharded(built.model)
        local = (numpy.concatenate(keys), torch.cat(sums).numpy())
        everyone = ranks.gather(local)
        all_keys = numpy.concatenate([keys_of_rank for keys_of_rank, _ in everyone])
        all_sums = numpy.concatenate([sums_of_rank for _, sums_of_rank in everyone])
        # equal examples, possibly on different ranks, are stored once; sorted by key
        self._keys, first = numpy.unique(all_keys, return_index=True)
        self._sums = all_sums[first]

    def save(self, file: Path, fingerprint: dict[str, Any]) -> None:
        """Write a safetensors file: int64 hashes in ascending order, float32 sums; in its header
        the fingerprint and a checksum."""
        tensors = {KEYS: torch.from_numpy(self._keys), SUMS: torch.from_numpy(self._sums)}
        checksum = checksum_of(self._keys, self._sums, fingerprint)
        description = {FINGERPRINT: fingerprint, CHECKSUM: checksum}
        header = {DESCRIPTION: json.dumps(description, sort_keys=True)}
        file.unlink(missing_ok=True)  # version 0.1.0 made hard links to it
        file.write_bytes(safetensors.torch.save(tensors, header))

    def load(self, file: Path, fingerprint: dict[str, Any]) -> dict[str, Any]:
        """Read what `save` wrote, and return its whole fingerprint.

        Args:
            file: the file.
            fingerprint: entries that must be equal in the file.

        Raises:
            ValueError: the file is missing or corrupted.
            UserError: the fingerprint differs.
        """
        try:
            if not file.is_file():  # to open a pipe would wait for ever
                raise ValueError("not a file" if file.exists() else "no such file")
            with safe_open(file, framework="np") as opened:
                description = json.loads(opened.metadata()[DESCRIPTION])
                keys = opened.get_tensor(KEYS)
                sums = opened.get_tensor(SUMS)
            saved: dict[str, Any] = description[FINGERPRINT]
            if description[CHECKSUM] != checksum_of(keys, sums, saved):
                raise ValueError("its checksum differs")
        except Exception as error:  # safetensors has its own errors
            raise ValueError(
                f"{file}: cannot be read as log-probabilities of a reference ({reason(error)})."
            ) from error
        others = [name for name, value in fingerprint.items() if saved.get(name) != value]
        if others:
            raise UserError(
                f"{file}: these log-probabilities of the reference were computed with another {', '.join(others)}.\n"
                "Resume with what the run was begun with. Or begin a new run: recipes/export.py makes a model of the "
                "checkpoint, and --reference_model takes the model that was fine-tuned."
            )
        self._keys = keys
        self._sums = sums
        return saved


def checksum_of(keys: numpy.ndarray, sums: numpy.ndarray, fingerprint: dict[str, Any]) -> str:
    """Return the xxh3_128 hash of everything in the file of a reference, in hex."""
    digest = xxhash.xxh3_128(keys.tobytes())
    digest.update(sums.tobytes())
    digest.update(json.dumps(fingerprint, sort_keys=True).encode())
    return digest.hexdigest()


class ReferencePass(FirstPass):
    """Fills the `StoredReference` of an objective: with --reference_model, or else by the model
    itself before step 1. See `FirstPass`.

    Args:
        config: the settings of the run.
        stored: the reference that it fills.
    """

    title = "Reference"
    flag = "--reference_model"

    def __init__(self, config: Config, stored: StoredReference) -> None:
        super().__init__(config, config.preference.reference_model, config.quantization)
        self._stored = stored
        # A resumed run has the same; the attempt of a run that ended before its first checkpoint may
        # have had others.
        whole = dataclasses.asdict(config)
        own = [config.train.seed, whole["model"], whole["peft"], whole["quantization"]]
        described = json.dumps(own, sort_keys=True)
        self._settings = {"settings": hashlib.sha256(described.encode()).hexdigest()}
        self._fingerprint = dict[str, Any]()  # everything that determines the numbers
        self._is_complete = False  # all examples have their numbers

    def compute(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> torch.Tensor:
        """See `FirstPass`."""
        return score_examples(built, batch, ranks)

    def fill_for_plan(self) -> None:
        """See `FirstPass`. The forward pass of the same model in each step holds at least as much
        as stored numbers; another model is planned by itself."""
        self._stored.is_planned = True

    def prepare(
        self, inputs: PassInputs, build_model: models.BuildModel, memory: PhaseMonitor
    ) -> None:
        """See `FirstPass`. Without --reference_model only a resumed run finds its numbers here."""
        self._inputs = inputs
        if self.name is not None and inputs.dataset.media is not None:
            raise UserError(
                f"--reference_model: not supported if samples have {KIND}. Leave it out: the reference "
                "is then the model before training."
            )
        self._fingerprint = dict[str, Any](inputs.dataset.fingerprints())
        template = json.dumps(inputs.tokenizer.chat_template)
        self._fingerprint |= {
            "chat_template": hashlib.sha256(template.encode()).hexdigest(),
            "precision": self.config.train.precision,
            "quantization": self.config.quantization.mode,
        }
        if self.name is None:
            self._fingerprint["model"] = models.fingerprint(inputs.request.folder)
        if inputs.resumed:
            self._load_resumed(inputs.resumed)
        if self.name is None or self._is_complete:
            return
        other = self.find_other_model(self.name)
        self._fingerprint["model"] = models.fingerprint(other.folder)
        if inputs.unfinished is not None and self._load_from(inputs.unfinished):
            return

        def score(built: BuiltModel) -> None:
            self._stored.compute(built, scored_batches(inputs), inputs.ranks)

        self.run_other_model(other, score, build_model, memory)
        self._is_complete = True

    def complete(self, built: BuiltModel, directory: Path) -> None:
        """See `FirstPass`. Each checkpoint gets a copy of the file."""
        ranks = self.inputs.ranks
        if not self._is_complete and not self._load_from(directory):
            self._stored.compute(built, scored_batches(self.inputs), ranks)
            self._is_complete = True
        file = directory / REFERENCE.file
        if ranks.is_main:
            self._stored.save(file, self._fingerprint | self._settings)
        count = plural(len(self._stored), "example")
        log.info(f"Reference: log-probabilities of {count}: {file}")

    def _load_resumed(self, folders: Iterable[Path]) -> None:
        """Read the numbers of a resumed run from the first of these directories that has a valid
        file. If none has, they are computed again.

        Raises:
            UserError: a file belongs to another run.
        """
        for folder in folders:
            file = folder / REFERENCE.file
            problem = ""
            try:
                saved = self._stored.load(file, self._fingerprint)
            except ValueError as error:
                problem = str(error)
            is_readable = self.inputs.ranks.all_gather_floats(not problem)
            if is_readable.all():
                self._is_complete = True
                self._fingerprint = saved  # also names --reference_model's weights
                count = plural(len(self._stored), "example")
                log.info(f"Reference: log-probabilities of {count} from {file}")
                return
            log.warning(problem or f"{file}: another rank cannot read it.")
        log.warning("The log-probabilities of the reference are computed again.")

    def _load_from(self, directory: Path) -> bool:
        """Read the numbers of an attempt of this run that has ended before its first checkpoint, if
        all ranks can, and everything was the same."""
        file = directory / REFERENCE.file
        try:
            self._stored.load(file, self._fingerprint | self._settings)
            is_usable = True
        except (ValueError, UserError):  # missing, corrupted, or of other settings
            is_usable = False
        self._is_complete = bool(self.inputs.ranks.all_gather_floats(is_usable).all())
        if self._is_complete:
            log.info(f"Reference: log-probabilities of an earlier attempt, from {file}")
        return self._is_complete


def scored_batches(inputs: PassInputs) -> Iterator[Batch]:
    """Yield this rank's examples of all sets in micro-batches of the size of training. Every rank
    has the same number of them."""
    layout = inputs.layout
    for samples in (inputs.dataset.train, *inputs.dataset.validations.values()):
        if samples is None:
            continue
        lengths = example_lengths(samples)
        group = group_size(samples)
        for indices in evaluation_batches(lengths, layout, examples_per_sample=group):
            # one example of each sample at a time: KTO's training holds no more
            for place in range(group):
                chosen = indices[place::group]
                yield layout.collate(samples, chosen)
