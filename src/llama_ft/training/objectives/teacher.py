"""The pass of a teacher over the training samples, before the student is built.

    training samples  --teacher's forward, shared by the ranks-->  k most likely tokens per target
                      -->  teacher.safetensors, batch by batch  -->  the teacher is freed

The file is that of an earlier run (--teacher_file, or the run that is resumed), made by
--teacher_model, or made of the column logprobs of the samples. The first rank of each node writes
it in the cache. Rank 0 moves it into the directory of the run, which does not exist yet.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from datasets import Dataset

from llama_ft import models
from llama_ft.config import Config, QuantizationConfig
from llama_ft.config.home import expanded
from llama_ft.config.objectives import TEACHER
from llama_ft.data import (
    IGNORED,
    Batch,
    TokenizedData,
    cache_dir,
    collate,
    evaluation_batches,
    example_lengths,
)
from llama_ft.data.read.formats import LOG_PROBABILITIES, BadSample, Sample
from llama_ft.errors import RunFailure, UserError, plural, reason
from llama_ft.models import BuiltModel
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.phases import PhaseMonitor
from llama_ft.runtime import Ranks, log
from llama_ft.training.objectives.base import shifted_labels, target_losses
from llama_ft.training.objectives.first_pass import FirstPass, PassInputs
from llama_ft.training.objectives.reference import example_key, example_keys
from llama_ft.training.objectives.teacher_file import (
    TeacherFile,
    TeacherWriter,
    check_file,
    stored_bytes,
)

SECONDS_BETWEEN_LINES = 30.0
EXAMPLES_AT_ONCE = 1024  # whose keys are computed
ENTRY = (
    "expected for each token in the loss its log-probabilities by token id, as vLLM's logprobs are: "
    '{"1042": -0.31, "88": -1.72}'
)


class AnyTeacher:
    """Numbers of no teacher, which take as much memory, for a plan. `size`: per target."""

    def __init__(self, size: int) -> None:
        self._size = size

    def of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TeacherFile.of`."""
        targets = int((shifted_labels(batch) != IGNORED).sum())
        token_ids = torch.arange(self._size).expand(targets, self._size)
        return token_ids, torch.full((targets, self._size), -math.log(self._size))


class HasTeacher(Protocol):
    """An objective with a teacher."""

    teacher: TeacherFile | AnyTeacher | None


class TeacherPass(FirstPass):
    """Finds or stores the teacher's probabilities of the training samples. See `FirstPass`.

    Args:
        config: the settings of the run.
        objective: gets the stored probabilities.
    """

    title = "Teacher"
    flag = "--teacher_model"

    def __init__(self, config: Config, objective: HasTeacher) -> None:
        settings = config.preference
        quantization = QuantizationConfig(mode=settings.teacher_quantization)
        super().__init__(config, settings.teacher_model, quantization)
        self._objective = objective
        self._settings = settings
        self._path = Path()  # of the file

    def needs_other_model(self) -> bool:
        """See `FirstPass`."""
        file = self._settings.teacher_file
        return self.name is not None and not (file and expanded(file).exists())

    def compute(
        self, built: BuiltModel, batch: Batch, ranks: Ranks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FirstPass`."""
        built.model.eval()
        size = self._settings.distill_top_k
        temperature = self._settings.distill_temperature
        vocabulary = None if self._inputs is None else self._inputs.vocabulary
        return most_likely_of(built, batch, size, temperature, vocabulary, ranks.device)

    def fill_for_plan(self) -> None:
        """See `FirstPass`."""
        self._objective.teacher = AnyTeacher(self._settings.distill_top_k)

    def bytes_per_token(self) -> int:
        """See `FirstPass`."""
        return stored_bytes(0, 1, self._settings.distill_top_k)

    def bytes_of(self, examples: int, tokens: int) -> int:
        """See `FirstPass`."""
        return stored_bytes(examples, tokens, self._settings.distill_top_k)

    def prepare(
        self, inputs: PassInputs, build_model: models.BuildModel, memory: PhaseMonitor
    ) -> None:
        """See `FirstPass`."""
        self._inputs = inputs
        size = self._settings.distill_top_k
        student = inputs.request.config.model.model_name
        self._check_size(student, inputs.vocabulary)
        fingerprint: dict[str, Any] = {
            "dataset": inputs.dataset.fingerprints()["dataset"],
            "distill_top_k": size,
            "distill_temperature": self._settings.distill_temperature,
            "vocabulary": inputs.vocabulary,
        }
        path = self._find_file(fingerprint | self._asked_teacher())
        if path is None:
            if self.name is None:
                path = self._read_column(fingerprint)
            else:
                path = self._run_teacher(self.name, build_model, memory, fingerprint)
        log.info(f"Teacher: its {size} most likely tokens per target: {path}")
        self._path = path
        self._objective.teacher = TeacherFile(path)

    def complete(self, built: BuiltModel, directory: Path) -> None:
        """See `FirstPass`. --teacher_file stays where it is."""
        ranks = self.inputs.ranks
        if self._settings.teacher_file or not ranks.is_main:
            return
        final_path = directory / TEACHER.file
        if final_path.exists() and final_path.samefile(self._path):
            return
        is_one_node = ranks.local_world_size == ranks.world_size
        if is_one_node and self._path.is_relative_to(cache_dir()):
            shutil.move(self._path, final_path)  # ranks that have mapped it keep it open
        else:
            aside = final_path.with_name(f".{final_path.name}.copied")
            shutil.copyfile(self._path, aside)
            os.replace(aside, final_path)
        log.info(f"Teacher: its file is now {final_path}")

    def _asked_teacher(self) -> dict[str, Any]:
        """Return what the fingerprint of an existing file must say about --teacher_model. Of a
        teacher on the Hub, which may not be downloaded here, only the name is compared."""
        name = self._settings.teacher_model
        if name is None:
            return {}
        quantization = {"teacher_quantization": self._settings.teacher_quantization}
        folder = expanded(name)
        if (folder / "config.json").is_file():
            return quantization | {"teacher_weights": models.fingerprint(folder)}
        return quantization | {"teacher_model": name}

    def _check_size(self, name: str, vocabulary: int | None) -> None:
        size = self._settings.distill_top_k
        if vocabulary is not None and size > vocabulary:
            raise UserError(
                f"--distill_top_k {size}: {name} has only {plural(vocabulary, 'token')}. Set a smaller one."
            )

    def _find_file(self, fingerprint: dict[str, Any]) -> Path | None:
        """Return the existing file of --teacher_file, or else of the resumed run, on all nodes.

        Raises:
            UserError: --teacher_file is corrupted, or a file belongs to other data or settings.
        """
        named = self._settings.teacher_file
        if named is not None:
            path = expanded(named)
            exists = self.inputs.ranks.all_gather_floats(path.exists())
            if exists.all():
                self._check(path, fingerprint)
                return path
            if exists.any():
                raise UserError(
                    f"--teacher_file {named}: exists on some nodes only. Copy it to all nodes, or delete it."
                )
            return None
        if not self.inputs.resumed:
            return None
        path = self.inputs.resumed[-1] / TEACHER.file  # of the run
        try:
            self._check(path, fingerprint)
        except UserError as error:
            if not isinstance(error.__cause__, ValueError):  # of other data
                raise
            log.warning(f"{error.messages[0]}\nThe teacher's probabilities are computed again.")
            return None
        return path

    def _check(self, file: Path, fingerprint: dict[str, Any]) -> None:
        """Check a file, once per node. Raises a UserError on all ranks, caused by a ValueError if
        the file is missing or corrupted."""
        try:
            self._on_each_node(lambda: check_file(file, fingerprint))
        except ValueError as error:
            raise UserError(f"{error}\nDelete it to compute it again.") from error

    def _on_each_node(self, work: Callable[[], object]) -> None:
        """Run `work` on the first rank of each node. All ranks raise its error."""
        problem: Exception | None = None
        if self.inputs.ranks.local_rank == 0:
            try:
                work()
            except (UserError, ValueError, OSError) as error:
                problem = error
        for problem_there in self.inputs.ranks.gather(problem):
            if isinstance(problem_there, OSError):
                raise UserError(f"the teacher's file cannot be written: {reason(problem_there)}.")
            if problem_there is not None:
                raise problem_there

    def _new_file(self, fingerprint: dict[str, Any]) -> tuple[Path, bool]:
        """Return where to write the file, or where a valid one is already, and which of the two it
        is. A run that did not begin has left it in the cache, one without a checkpoint in its
        directory."""
        named = self._settings.teacher_file
        if named:
            return expanded(named), False
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:32]
        path = cache_dir() / "teachers" / f"{digest}.safetensors"
        unfinished = self.inputs.unfinished
        left = [path] if unfinished is None else [path, unfinished / TEACHER.file]
        for file in left:
            with contextlib.suppress(UserError):
                self._check(file, fingerprint)
                return file, True
        return path, False

    def _run_teacher(
        self,
        name: str,
        build_model: models.BuildModel,
        memory: PhaseMonitor,
        fingerprint: dict[str, Any],
    ) -> Path:
        """Run the teacher over the training samples. Return the file."""
        other = self.find_other_model(name)
        self._check_size(name, models.vocabulary_size(other.config))
        fingerprint = fingerprint | {
            "teacher_model": name,
            "teacher_weights": models.fingerprint(other.folder),
            "precision": self.config.train.precision,
            "teacher_quantization": self.config.quantization.mode,
        }
        path, is_valid = self._new_file(fingerprint)
        if is_valid:
            return path

        def write(built: BuiltModel) -> None:
            writers = list[TeacherWriter]()
            self._on_each_node(lambda: writers.append(self._new_writer(path, fingerprint)))
            with _abandoned_on_error(writers):
                self._write(writers, self._batches_of(built))
                self._on_each_node(lambda: finish(writers))

        self.run_other_model(other, write, build_model, memory)
        return path

    def _batches_of(self, built: BuiltModel) -> Iterator[list[Any]]:
        """Yield, for one micro-batch of each rank, the indices of its examples, and the tokens and
        log-probabilities of their targets."""
        samples = _training_samples(self.inputs.dataset)
        layout = self.inputs.layout
        ranks = self.inputs.ranks
        for indices in evaluation_batches(example_lengths(samples), layout):
            batch = layout.collate(samples, indices)
            token_ids, log_probabilities = self.compute(built, batch, ranks)
            numbers = token_ids.to(torch.int32).cpu().numpy(), log_probabilities.cpu().numpy()
            yield _joined(ranks.gather((indices, *numbers)), ranks.data.processes)
        free_unsharded(built.model)

    def _read_column(self, fingerprint: dict[str, Any]) -> Path:
        """Store the column logprobs of the samples. Return the file."""
        assert self.inputs.dataset.untokenized is not None
        source, _ = self.inputs.dataset.untokenized
        parts = source.datasets or (source,)
        if not all(LOG_PROBABILITIES in part.columns for part in parts):
            named = self._settings.teacher_file
            missing = (
                f"--teacher_file {named}: no such file, and" if named else "--objective distill:"
            )
            raise UserError(
                f"{missing} {source.name} has no column {LOG_PROBABILITIES}. Set --teacher_model, or "
                "--teacher_file of another run."
            )
        if self._settings.distill_temperature != 1:
            raise UserError(
                f"--distill_temperature {self._settings.distill_temperature}: the column {LOG_PROBABILITIES} has "
                "probabilities at temperature 1. Leave it out, or set --teacher_model."
            )
        identity = hashlib.sha256(source.identity.encode()).hexdigest()
        fingerprint = fingerprint | {"column": identity}
        path, is_valid = self._new_file(fingerprint)
        # No collective: it would time out, because reading much data takes long.
        with self.inputs.ranks.local_main_process_first():
            if self.inputs.ranks.local_rank == 0 and not is_valid:
                vocabulary = self.inputs.vocabulary or len(self.inputs.tokenizer)
                column = column_of_samples(self.inputs.dataset, self.config, vocabulary)
                writers = [self._new_writer(path, fingerprint)]
                with _abandoned_on_error(writers):
                    self._write(writers, ([of_sample] for of_sample in column))
                    finish(writers)
        return path

    def _new_writer(self, path: Path, fingerprint: dict[str, Any]) -> TeacherWriter:
        samples = _training_samples(self.inputs.dataset)
        targets = samples.with_format("arrow")[:]["target_tokens"].to_numpy()
        return TeacherWriter(path, fingerprint, keys_of(samples), targets)

    def _write(self, writers: list[TeacherWriter], samples: Iterable[list[Any]]) -> None:
        """Write what `_batches_of` yields, with the writer of this rank if it has one."""
        total = len(_training_samples(self.inputs.dataset))
        count = 0
        logged = time.monotonic()
        for of_sample in samples:
            for indices, token_ids, log_probabilities in of_sample:
                for writer in writers:
                    writer.write(indices, token_ids, log_probabilities)
                count += len(indices)
            if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
                logged = time.monotonic()
                log.info(f"teacher: {count:,} of {plural(total, 'sample')}")
        if count != total:
            raise RunFailure(f"teacher: {count:,} of {plural(total, 'sample')} computed.")


def _joined(parts: list[Any], processes: int) -> list[Any]:
    """Return the result of each data rank from those of all processes: the processes that share a
    sequence have computed its targets in the order of their ranks."""
    joined = []
    for first in range(0, len(parts), processes):
        indices, *_ = parts[first]
        _, token_ids, log_probabilities = zip(*parts[first : first + processes], strict=True)
        joined.append((indices, numpy.concatenate(token_ids), numpy.concatenate(log_probabilities)))
    return joined


@contextlib.contextmanager
def _abandoned_on_error(writers: list[TeacherWriter]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise


def finish(writers: list[TeacherWriter]) -> None:
    """Finish the file of this rank, if it writes one."""
    for writer in writers:
        writer.finish()


def most_likely(
    logits: torch.Tensor, count: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens, int64 [targets, count], and their log-probabilities, float32
    [targets, count], of logits [targets, vocab]."""
    scaled = logits.float() / temperature
    values, token_ids = scaled.topk(count, dim=-1)
    return token_ids, values - scaled.logsumexp(-1, keepdim=True)


@torch.no_grad()
def most_likely_of(
    built: BuiltModel,
    batch: Batch,
    size: int,
    temperature: float,
    vocabulary: int | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens, int64 [targets, size], and their log-probabilities, float32
    [targets, size], of a micro-batch. `vocabulary`: of the student; a teacher may have more logits,
    for no token."""
    chunks = list[tuple[torch.Tensor, torch.Tensor]]()

    def collect(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chunks.append(most_likely(logits[:, :vocabulary], size, temperature))
        return torch.zeros(len(targets), device=logits.device)

    targets = target_losses(built, batch, device, collect).targets
    # the last chunk is padded
    token_ids = torch.cat([ids for ids, _ in chunks])[:targets]
    log_probabilities = torch.cat([values for _, values in chunks])[:targets]
    return token_ids, log_probabilities


def keys_of(samples: Dataset) -> numpy.ndarray:
    """Return the keys of all examples, int64 [examples]."""
    keys = [numpy.zeros(0, numpy.int64)]
    for first in range(0, len(samples), EXAMPLES_AT_ONCE):
        indices = range(first, min(first + EXAMPLES_AT_ONCE, len(samples)))
        keys.append(example_keys(collate(samples, indices, 0, is_packed=True)))
    return numpy.concatenate(keys)


def column_of_samples(
    dataset: TokenizedData, config: Config, vocabulary: int
) -> Iterator[tuple[list[int], numpy.ndarray, numpy.ndarray]]:
    """Yield, per training sample, the indices of the examples that it is, and the tokens and
    log-probabilities of their targets from the column logprobs.

    Raises:
        UserError: the column of a sample does not fit it.
    """
    assert dataset.untokenized is not None
    source, encoder = dataset.untokenized
    if encoder.truncation not in ("right", "drop"):
        raise UserError(
            f"--truncation {encoder.truncation}: the column {LOG_PROBABILITIES} needs right or drop."
        )
    size = config.preference.distill_top_k
    missing = dict[int, list[int]]()
    for index, key in enumerate(keys_of(_training_samples(dataset)).tolist()):
        missing.setdefault(key, []).append(index)
    for place, sample, sample_format in source.formatted_samples(config.data.dataset_format):
        if isinstance(sample, BadSample):
            continue
        if sample_format != "tokenized":
            raise UserError(
                f"{place}: the column {LOG_PROBABILITIES} needs samples of tokens, with a column input_ids; "
                f"these are of the format {sample_format}."
            )
        try:
            input_ids, labels = encoder.tokenize(sample, sample_format)
        except BadSample:  # counted before
            continue
        length = min(len(input_ids), encoder.context_length)
        kept_ids = numpy.array(input_ids[:length], numpy.int64)
        kept_labels = numpy.array(labels[:length], numpy.int64)
        indices = missing.pop(example_key(kept_ids, kept_labels), None)
        if indices is None:  # of the validation set, or seen before
            continue
        entries = _entries(sample, len(input_ids), place)
        targets = [number for number in range(1, length) if labels[number] != IGNORED]
        best = []
        for number in targets:
            location = f"{place}: {LOG_PROBABILITIES}[{number}]"
            best.append(_best_of(entries[number], size, vocabulary, location))
        token_ids = numpy.array([[token for token, _ in of_target] for of_target in best], "<i4")
        values = numpy.array([[value for _, value in of_target] for of_target in best], "<f4")
        copies = (len(indices), 1)
        yield indices, numpy.tile(token_ids, copies), numpy.tile(values, copies)
    if missing:
        raise UserError(
            f"{source.name}: {plural(len(missing), 'sample')} changed while their column {LOG_PROBABILITIES} was read."
        )


def _training_samples(dataset: TokenizedData) -> Dataset:
    assert dataset.train is not None  # not with streaming
    return dataset.train


def _entries(sample: Sample, length: int, place: str) -> list[Any]:
    """Return the entry of each token that the attention mask keeps."""
    entries = sample.get(LOG_PROBABILITIES)
    if isinstance(entries, list):
        mask = sample.get("attention_mask") or [1] * len(entries)
        entries = list(compress(entries, mask))
        if len(entries) == length:
            return entries
        held = f"has {len(entries):,} entries for {plural(length, 'token')}"
    else:
        held = "is missing" if entries is None else "is not a list"
    raise UserError(f"{place}: {LOG_PROBABILITIES} {held}; {ENTRY}.")


def _best_of(entry: Any, size: int, vocabulary: int, location: str) -> list[tuple[int, float]]:
    """Return the most likely tokens of an entry with their log-probabilities, in descending
    order."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{location}: {entry!s:.60}; {ENTRY}.")
    pairs = list[tuple[int, float]]()
    for token, value in entry.items():
        if value is None:  # Arrow adds the tokens of other entries
            continue
        number = value.get("logprob") if isinstance(value, Mapping) else value
        is_token = str(token).isdecimal() and int(token) < vocabulary
        if not is_token or not isinstance(number, int | float) or not number <= 1e-3:
            raise UserError(f"{location}: token {token!s:.30} has {value!s:.60}; {ENTRY}.")
        if math.isfinite(number):
            pairs.append((int(token), min(float(number), 0.0)))
    if len(pairs) < size:
        raise UserError(
            f"{location}: has {len(pairs)} log-probabilities; expected at least --distill_top_k {size}."
        )
    total = sum(math.exp(number) for _, number in pairs)
    if total > 1.01:
        raise UserError(f"{location}: its probabilities add up to {total:.3g}; {ENTRY}.")
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:size]
