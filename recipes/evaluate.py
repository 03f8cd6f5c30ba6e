"""Evaluate models: loss and perplexity on a validation set, and tasks of lm-evaluation-harness.

MODEL is a run's directory, a checkpoint, a saved adapter, or the directory or Hub name of a model.
--base adds the base model of each. Without --dataset the samples are the run's validation set, and
the loss is the one that the run computed.
"""

import gc
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

if __name__ == "__main__":  # Ctrl-C prints no traceback of an import; runtime.start replaces it
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped by Ctrl-C\n") and os._exit(130))

from llama_ft.config import FSDPConfig  # noqa: E402
from llama_ft.config.home import expanded  # noqa: E402
from llama_ft.errors import UserError, before_imports  # noqa: E402
from llama_ft.evaluation.flags import EvaluationRequest, ModelToEvaluate, read_evaluate_flags  # noqa: E402

if __name__ == "__main__":
    with before_imports():
        EVALUATION = read_evaluate_flags(sys.argv[1:], str(__doc__))

import torch  # noqa: E402
from finetuning import build_model  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

from llama_ft import data, models, runtime  # noqa: E402
from llama_ft.evaluation.measure import (  # noqa: E402
    find_tasks,
    measure_loss,
    prepare_samples,
    run_tasks,
)
from llama_ft.evaluation.results import Evaluated, describe, write_json  # noqa: E402
from llama_ft.inference.load import FineTuned, open_model  # noqa: E402
from llama_ft.models.architecture.text_part import names_score  # noqa: E402
from llama_ft.processes import replace_text  # noqa: E402
from llama_ft.runtime import Ranks, log  # noqa: E402

TASK_SETTINGS = ("limit", "num_fewshot", "apply_chat_template", "batch_size")


def main(what: EvaluationRequest) -> None:
    """Load each model, evaluate it, and print the tables."""
    flags = what.flags
    with runtime.start(
        flags.device, models.shard_degree(FSDPConfig(enable_fsdp=flags.enable_fsdp))
    ) as ranks:
        tasks = find_tasks(flags.tasks, ranks) if flags.tasks else None
        results, bases = list[Evaluated](), list[tuple[Any, Evaluated]]()
        reported = set[str]()
        for candidate in what.models:
            tuned, tokenizer = evaluate(candidate, None, tasks, what, ranks, reported)
            base = results[0] if results else None
            if candidate.base is not None:
                # With the fine-tuned model's tokenizer and chat template, the base model gets the
                # same tokens.
                run = candidate.run and (
                    candidate.run.model,
                    candidate.run.quantization,
                    candidate.run.train.precision,
                )
                alike = candidate.base, tokenizer.chat_template, len(tokenizer), run
                base = next((known for key, known in bases if key == alike), None)
                if base is None:
                    base, _ = evaluate(candidate, tokenizer, tasks, what, ranks, reported)
                    bases.append((alike, base))
                    results.append(base)
            results.append(replace(tuned, base=base))
        if ranks.is_main:
            log.info(f"\n{describe(results, what.samples, flags.limit)}")
            if flags.output:
                settings = {name: getattr(flags, name) for name in TASK_SETTINGS}
                file = expanded(flags.output)
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(file, write_json(results, what.samples, settings))
                log.info(f"\nResults: {flags.output}")


def evaluate(
    candidate: ModelToEvaluate,
    tokenizer: PreTrainedTokenizerBase | None,
    tasks: Any,
    what: EvaluationRequest,
    ranks: Ranks,
    reported: set[str],
) -> tuple[Evaluated, PreTrainedTokenizerBase]:
    """Load a model and evaluate it. With the tokenizer of a fine-tuned model: evaluate its base
    model. `reported`: as of `measure_loss`."""
    flags = replace(
        what.flags,
        precision=what.flags.precision
        or (candidate.run.train.precision if candidate.run else "auto"),
    )
    samples = list[data.TokenizedData]()

    def prepare(request: models.ModelRequest, with_tokenizer: Any, _: Any) -> data.Media | None:
        if names_score(request.model_config):
            return None  # see below
        samples.append(prepare_samples(request, with_tokenizer, candidate, what, ranks))
        return samples[0].media

    open_media = prepare if what.samples else None
    open_with = partial(open_model, ranks=ranks, build_model=build_model, open_media=open_media)
    if tokenizer is None:
        name, opened = candidate.place, open_with(candidate.place, flags)
    else:
        name = f"base: {candidate.base}" + (
            f" (of {candidate.place})" if len(what.models) > 1 else ""
        )
        opened = open_with(str(candidate.base), flags, base_of=FineTuned(candidate.run, tokenizer))
    log.info(opened.about)
    if opened.built.has_score:
        raise UserError(
            f"{name}: a reward model has no LM head. recipes/inference.py --prompts prints its scores."
        )
    held_out = None
    if samples:
        held_out = measure_loss(
            opened,
            samples[0],
            candidate,
            what,
            ranks,
            reported,
        )
    # frees cached blocks, whose sizes fit only the measurement of the loss
    torch.cuda.empty_cache()
    answers = (
        run_tasks(tasks, opened.model, opened.tokenizer, flags, ranks)
        if tasks is not None
        else None
    )
    leaks = samples[0].leaks if samples else ()
    result = Evaluated(name, opened.about, held_out, answers, leaks=leaks)
    tokenizer = opened.tokenizer
    del opened
    gc.collect()  # free this model before the next one is loaded
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return result, tokenizer


if __name__ == "__main__":
    main(EVALUATION)
