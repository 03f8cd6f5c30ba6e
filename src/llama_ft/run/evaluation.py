"""Evaluation during a run: validation losses, answers to the sample prompts, and with --score answers
to validation samples. The report shows the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash
from transformers import PreTrainedTokenizerBase

from llama_ft import training
from llama_ft.data.media import media_reader
from llama_ft.data.read.media import PATHS
from llama_ft.training.evaluation import SamplePrompt, SetScore

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun

PICTURES_SHOWN = 4  # per answer in the report


class Evaluation:
    """Evaluates the model of a run. All ranks call its methods together; they raise Stopped after a
    signal.

    Args:
        tokenizer: of the run.
        prompts: the sample prompts; none without sample_tokens.
        scores: of answers to validation samples.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[SamplePrompt],
        scores: training.Scores,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._scores = scores
        self._evaluated = dict[str, Any]()  # the size of an evaluation

    def metrics(
        self, run: TrainingRun, objective: training.Objective, step: int
    ) -> dict[str, float]:
        """Return the validation loss and related metrics after `step`, also of each validation set
        with a name."""
        settings = run.config.train
        layout = dataclasses.replace(run.batches.layout, micro_batch=settings.val_batch_size)
        sums = {}
        for name, samples in run.dataset.validations.items():
            own = objective.validation(name, run.built)
            sums[name] = own or training.loss_sums(
                run.built, objective, samples, layout, settings.max_eval_step, run.ranks
            )
        scores = self._score(run, step)
        losses = training.together(sums.values()).count
        answers = sum(score.count for score in scores.values())
        of_tokens = objective.counts_tokens and not objective.measures_reward
        evaluated = {"losses": losses, "of_tokens": of_tokens, "answers": answers}
        if evaluated != self._evaluated:
            self._evaluated = evaluated
            run.facts.add(evaluated=evaluated)
        metrics = training.evaluation_metrics(sums, scores, of_tokens)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _score(self, run: TrainingRun, step: int) -> dict[str, SetScore]:
        """Return the scores of each validation set; none without --score."""
        scores = self._scores.score(run.built, run.batches.layout, run.ranks)
        for name, score in scores.items():
            when = f"step {step}, {name}" if name else f"step {step}"
            _keep(run, when, score.samples, "scored")
        return scores

    def show_answers(self, run: TrainingRun, when: str) -> None:
        """Log the answers to the sample prompts under the heading `when`."""
        answers = training.answer_prompts(
            run.built,
            self._tokenizer,
            self._prompts,
            run.config.train.sample_tokens,
            run.batches.layout,
            run.ranks,
        )
        training.log_answers(when, answers)
        _keep(run, when, answers, "samples")


def _keep(run: TrainingRun, when: str, answers: list[dict[str, Any]], kind: str) -> None:
    """Keep answers for the report, with small pictures. A picture is stored once,
    although each evaluation shows it."""
    answers_to_keep = []
    pictures = {}
    for answer in answers if run.ranks.is_main else ():
        paths = answer.get(PATHS, ())[:PICTURES_SHOWN]
        urls = [media_reader().thumbnail(path) for path in paths]
        named = {xxhash.xxh3_64_hexdigest(url.encode()): url for url in urls if url}
        pictures.update(named)
        answers_to_keep.append({**answer, PATHS: list(named)} if named else answer)
    if pictures:
        run.facts.add_pictures(pictures)
    run.facts.add_samples(when, answers_to_keep, kind)
