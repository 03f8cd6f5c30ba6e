"""Score generated answers to the validation samples.

The reference is the last response of a sample, and the prompt is everything before it. Both are
read from the tokens and the labels, so that every format with a prompt can be scored:

    tokens  <s> user : 2 + 2 ? assistant : | 4 </s>        labels  - - - - - - - - - - | 4 </s>
            prompt                           reference

Which prompts share a batch does not depend on the number of ranks, so neither do the answers, also
those that are sampled: each batch has its own seed.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import numpy
import torch
from datasets import Dataset
from transformers import GenerationConfig, PreTrainedTokenizerBase

from llama_ft.config import TrainConfig
from llama_ft.data import IGNORED, BatchLayout, stop_token_ids
from llama_ft.data.media import MediaPrompt
from llama_ft.data.read.media import PATHS
from llama_ft.errors import UserError
from llama_ft.evaluation.pass_at_k import mean_pass_at_k, powers_of_two
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks
from llama_ft.training.evaluation import AnswerGenerator, Scores, SetScore, longest_answer
from llama_ft.user_function import load_function

FEWEST_PROMPT_TOKENS = 2  # a text has no prompt, but its first token may not be in the loss
RIGHT = 1.0  # a score from which on an answer counts for pass@k
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}  # Transformers' default is the top 50
SAMPLES_SHOWN = 5  # per validation set, in the report
LONGEST_SHOWN = 4000  # characters


class ScoredPrompt(NamedTuple):
    """A validation sample to answer. `prompt_ids` are a `MediaPrompt` if it has media."""

    prompt_ids: list[int]
    prompt: str
    reference: str
    location: str


def exact(prompt: str, answer: str, reference: str) -> bool:
    """Return whether the answer is the reference."""
    return answer == reference


def contains(prompt: str, answer: str, reference: str) -> bool:
    """Return whether the reference is a part of the answer."""
    return reference in answer


def same_json(prompt: str, answer: str, reference: str) -> bool:
    """Return whether both are JSON of the same value. Raises ValueError if the reference is not
    JSON."""
    expected = _canonical(reference)
    try:
        return _canonical(answer) == expected
    except ValueError:
        return False


def _canonical(text: str) -> str:
    """Return JSON in one form: sorted keys, and numbers as their value (1.0 is 1)."""
    try:
        value = json.loads(text, parse_int=Decimal, parse_float=Decimal)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return json.dumps(
        value, sort_keys=True, default=lambda number: {"number": str(number.normalize())}
    )


SCORES: dict[str, Callable[[str, str, str], Any]] = {
    "exact": exact,
    "contains": contains,
    "json": same_json,
}


class AnswerScores(Scores):
    """Generates answers to validation sets and scores them by `--score`.

    Args:
        settings: score and those whose names begin with it.
        sets: the validation sets by name.
        tokenizer: of the run.

    Raises:
        UserError: a set has no sample with a prompt, or the function does not exist. It is called
            with a reference as the answer, and raises an error or returns no number.
    """

    def __init__(
        self,
        settings: TrainConfig,
        sets: Mapping[str, Dataset],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__(settings, sets, tokenizer)
        self._name = str(settings.score)
        self._tokens = settings.score_tokens
        self._batch_size = settings.score_batch_size
        self._answers = settings.score_answers  # neighbors in the list of questions
        self._tokenizer = tokenizer
        self._questions = dict[str, list[ScoredPrompt]]()
        self._function = SCORES.get(self._name) or load_function(self._name)
        for name, samples in sets.items():
            questions = find_questions(samples, tokenizer, settings.score_samples)
            if not questions:
                raise UserError(
                    f"--score {self._name}: no sample of the validation set {name}".rstrip()
                    + " has a prompt and a response."
                )
            # every reference must be JSON; of other functions, which may be slow, one call is enough
            tried = questions if self._name == "json" else questions[:1]
            for question in tried:
                self._score(question, question.reference)
            self._questions[name] = [one for one in questions for _ in range(self._answers)]

    def score(self, built: BuiltModel, layout: BatchLayout, ranks: Ranks) -> dict[str, SetScore]:
        """Answer all questions. All ranks must call it.

        Args:
            built: the model, in training mode, also afterwards.
            layout: of batches: what makes their tensors, and the token that fills answers that end
                before the longest one.
            ranks: the ranks. Each generates some of the batches.

        Raises:
            Stopped: a signal has asked to stop.
            UserError: the function raises an error or returns no number.
        """
        model = built.model
        before = model.generation_config
        known = before.eos_token_id
        if known is None:
            known = getattr(model.config.get_text_config(), "eos_token_id", None)
        ends = stop_token_ids(self._tokenizer, known)
        # not the model's generation_config.json, which may ask for sampling or for penalties
        model.generation_config = GenerationConfig(
            **(SAMPLED if self._answers > 1 else GREEDY),
            pad_token_id=layout.pad_token_id,
            eos_token_id=ends or None,
        )
        try:
            return {
                name: self._score_set(built, questions, layout, ranks)
                for name, questions in self._questions.items()
            }
        finally:
            model.generation_config = before

    def _score_set(
        self,
        built: BuiltModel,
        questions: list[ScoredPrompt],
        layout: BatchLayout,
        ranks: Ranks,
    ) -> SetScore:
        lengths = numpy.array([len(question.prompt_ids) for question in questions])
        order = numpy.argsort(-lengths, kind="stable").tolist()
        starts = range(0, len(order), self._batch_size)
        batches = [order[start : start + self._batch_size] for start in starts]
        answers = dict[int, str]()
        generator = AnswerGenerator(built, self._tokenizer, layout.media, ranks)
        for first in range(0, len(batches), ranks.answering.size):
            number = first + ranks.answering.rank
            is_own = number < len(batches)
            # all ranks must generate equally often: one without a batch repeats the shortest prompt
            batch = batches[number] if is_own else order[-1:]
            prompts = [questions[index].prompt_ids for index in batch]
            longest = longest_answer(built.model, prompts, self._tokens)
            with self._seeded(number, ranks):
                texts = generator.own(prompts, longest)
            if is_own:
                answers |= dict(zip(batch, texts, strict=True))
        return self._gather(questions, answers, ranks)

    @contextlib.contextmanager
    def _seeded(self, batch: int, ranks: Ranks) -> Iterator[None]:
        """Sample the answers of a batch with random numbers of its own. Those of the training stay as
        they are."""
        devices = [ranks.device] if ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=self._answers > 1):
            if self._answers > 1:
                torch.manual_seed(batch)
            yield

    def _gather(
        self, questions: list[ScoredPrompt], answers: dict[int, str], ranks: Ranks
    ) -> SetScore:
        """Score this rank's answers, and return the result of all ranks. An error of one rank is
        raised on all of them."""
        scored: dict[int, tuple[str, float]] | UserError = {}
        try:
            scored = {
                index: (answer, self._score(questions[index], answer))
                for index, answer in answers.items()
            }
        except UserError as error:
            scored = error
        together = dict[int, tuple[str, float]]()
        for scores in ranks.gather(scored):
            if isinstance(scores, UserError):
                raise scores
            together |= scores
        samples = []
        for index in range(0, len(questions), self._answers)[:SAMPLES_SHOWN]:
            answer, score = together[index]
            question = questions[index]
            texts = {"question": question.prompt, "answer": answer, "reference": question.reference}
            shown: dict[str, Any] = {name: text[:LONGEST_SHOWN] for name, text in texts.items()}
            if isinstance(question.prompt_ids, MediaPrompt):
                shown[PATHS] = question.prompt_ids.paths
            samples.append({**shown, "score": score})
        # fsum rounds once, so the order of the ranks does not matter
        total = math.fsum(score for _, score in together.values())
        return SetScore(total, len(questions), samples, self._passes(together))

    def _passes(self, scored: Mapping[int, tuple[str, float]]) -> dict[int, float]:
        """Return K -> pass@K of the answers by index; empty if there is one per sample."""
        count = self._answers
        if count == 1:
            return {}
        scores = [scored[index][1] for index in range(len(scored))]
        of_samples = [scores[first : first + count] for first in range(0, len(scores), count)]
        return {k: mean_pass_at_k(of_samples, RIGHT, k) for k in powers_of_two(count)}

    def _score(self, question: ScoredPrompt, answer: str) -> float:
        head = f"--score {self._name}: {question.location}"
        try:
            value = self._function(question.prompt, answer, question.reference)
        except ValueError as error:  # of json
            raise UserError(f"{head}: the reference is not JSON ({error}).") from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, str) or not math.isfinite(number):
            raise UserError(f"{head}: returned {value!r:.100}; expected a finite number.")
        return number


def find_questions(
    samples: Dataset, tokenizer: PreTrainedTokenizerBase, most: int
) -> list[ScoredPrompt]:
    """Return the samples that have a prompt before their last response, in order.

    Args:
        samples: tokenized, with the columns `tokenize_files.FEATURES`.
        tokenizer: of the run.
        most: only so many of the first ones; 0 = all.
    """
    questions = list[ScoredPrompt]()
    columns = {"input_ids", "labels", "source", "text", "media"}
    for sample in samples.select_columns(sorted(columns.intersection(samples.column_names))):
        if most and len(questions) == most:
            break
        ids = sample["input_ids"]
        in_loss = numpy.array(sample["labels"]) != IGNORED
        end = len(ids) - int(in_loss[::-1].argmax())
        before = in_loss[:end]
        start = end - int((~before)[::-1].argmax())
        has_both = before.any() and not before.all()
        if not has_both or start < FEWEST_PROMPT_TOKENS:
            continue
        prompt = str(tokenizer.decode(ids[:start], skip_special_tokens=True))
        reference = str(tokenizer.decode(ids[start:end], skip_special_tokens=True))
        prompt_ids = ids[:start]
        if sample.get("text") is not None:
            prompt_ids = MediaPrompt(prompt_ids, sample["text"], sample["media"])
        questions.append(
            ScoredPrompt(prompt_ids, prompt.strip(), reference.strip(), sample["source"])
        )
    return questions
