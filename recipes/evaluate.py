"""Say how good a model is: its loss and perplexity on held-out rows, and tasks of lm-evaluation-harness.

MODEL is a run's directory, a checkpoint, a saved adapter, or the directory or Hub name of a model. --base adds the base
model of each. Without --dataset the samples are the run's validation set, and the loss is the run's own at that step.
"""

import dataclasses
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # no traceback out of an import; runtime.start takes it over
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped by Ctrl-C\n") and os._exit(130))

from llama_ft.config import FSDPConfig  # noqa: E402
from llama_ft.errors import before_imports  # noqa: E402
from llama_ft.evaluation.flags import TASK_FLAGS, Asked, Evaluation, read_evaluate_flags  # noqa: E402

if __name__ == "__main__":
    with before_imports():
        ASKED = read_evaluate_flags(sys.argv[1:], str(__doc__))

import torch  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

from llama_ft import data, models, runtime  # noqa: E402
from llama_ft.evaluation.held_out import describe_samples, describe_tokenizer, find_models, measure  # noqa: E402
from llama_ft.evaluation.results import Evaluated, describe, to_json  # noqa: E402
from llama_ft.evaluation.tasks import Tasks, find_tasks  # noqa: E402
from llama_ft.inference.load import open_model  # noqa: E402
from llama_ft.inference.prompts import answers_to  # noqa: E402
from llama_ft.runtime import Runtime, log  # noqa: E402

LOADING = ("base_model", "tokenizer_name", "trust_remote_code", "enable_fsdp")


def main(what: Evaluation) -> None:
    """From the flags to the tables on the screen."""
    with runtime.start(what.flags.device, models.shard_degree(FSDPConfig(enable_fsdp=what.flags.enable_fsdp))) as job:
        find_models(what, job)
        tasks = find_tasks(what.flags, job) if what.flags.tasks else None
        tuned, bases = list[Evaluated](), dict[tuple[Asked, str, int | None], Evaluated]()
        for asked, base in what.asked:
            result, tokenizer, rows = evaluate(asked, None, tasks, what, job)
            other = 0 if tuned else None
            if base is not None:
                # On the same tokens as the fine-tuned model: with its tokenizer and chat template.
                alike = (base, describe_tokenizer(tokenizer), rows)
                if alike not in bases:
                    if base.name in {known.name for known in bases.values()}:
                        base = dataclasses.replace(base, name=f"{base.name}, asked as {asked.name}")
                    bases[alike], *_ = evaluate(base, (tokenizer, rows), tasks, what, job)
                other = list(bases).index(alike)
            tuned.append(dataclasses.replace(result, compared_with=other))
        results, samples = [*bases.values(), *tuned], describe_samples(what)
        if job.is_main:
            log.info(f"\n{describe(results, samples, what.flags.limit)}")
            if what.flags.output_file:
                settings = {name: getattr(what.flags, name) for name in (*TASK_FLAGS, "batch_size")}
                with answers_to(Path(what.flags.output_file).expanduser(), overwrite=True) as file:
                    json.dump(to_json(results, samples, settings), file, indent=2)
                log.info(f"\nResults: {what.flags.output_file}")


def evaluate(
    asked: Asked,
    like: tuple[PreTrainedTokenizerBase, int | None] | None,
    tasks: Tasks | None,
    what: Evaluation,
    job: Runtime,
) -> tuple[Evaluated, PreTrainedTokenizerBase, int | None]:
    """Load a model and evaluate it, perhaps with the tokenizer and as many rows of the embedding as another model."""
    place = str(data.build_demo(data.cache_dir()).model_dir) if asked.place == "demo" else asked.place
    how: dict[str, Any] = {name: getattr(what.flags, name) for name in LOADING}
    how |= {"quantization": asked.quantization, "precision": asked.precision}
    opened = open_model(place, **how, tokenizer=like and like[0], rows=like and like[1], job=job)
    log.info(opened.about)
    tokenizer, rows = like[0] if like else opened.tokenizer, models.vocabulary_size(opened.model.config)
    held_out = None
    if what.rows != "none":
        held_out = measure(opened.model, tokenizer, what.config, what.split, asked, job)
    answers = tasks.ask(opened.model, tokenizer, what.flags.enable_fsdp, job) if tasks is not None else None
    result = Evaluated(asked.name, opened.about, held_out, answers)
    del opened
    gc.collect()  # before the next one is loaded
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return result, tokenizer, rows


if __name__ == "__main__":
    main(ASKED)
