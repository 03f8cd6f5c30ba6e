"""Say how good a model is: its loss and perplexity on held-out rows, and tasks of lm-evaluation-harness.

MODEL is a run's directory, a checkpoint, a saved adapter, or the folder or hub name of a model; several become lines of
one table, and --base adds the model that each was tuned from. Without --dataset the rows are those that the run held
out, and the loss is the one that the run itself had after that step.
"""

import dataclasses
import gc
import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

if __name__ == "__main__":  # no traceback out of an import; runtime.start takes it over
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped by Ctrl-C\n") and os._exit(130))

from llama_ft.config import FSDPConfig, exit_with  # noqa: E402
from llama_ft.config.evaluate_flags import TASK_FLAGS, Asked, read_evaluate_flags  # noqa: E402
from llama_ft.config.inference_flags import open_closed_streams  # noqa: E402
from llama_ft.config.paths import BUILT_IN_MODELS  # noqa: E402
from llama_ft.errors import RunFailure, UserError  # noqa: E402

if __name__ == "__main__":
    # Before the imports below, which take 6 s: --help and most mistakes are answered at once.
    try:
        open_closed_streams()
        OPTIONS = read_evaluate_flags(sys.argv[1:], str(__doc__))
    except UserError as error:
        exit_with(error)
    gc.disable()  # see finetuning.py

import torch  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

from llama_ft import data, evaluation, models, runtime  # noqa: E402
from llama_ft.inference import open_model  # noqa: E402
from llama_ft.runtime import Runtime, log  # noqa: E402


def main(options: Namespace) -> None:
    """From the flags to the tables on the screen."""
    degree = models.shard_degree(FSDPConfig(enable_fsdp=options.enable_fsdp))
    with runtime.start(options.device, degree) as job:
        look_up(options, job)
        tasks = evaluation.find_tasks(options, job) if options.tasks else None
        tuned, bases = list[evaluation.Evaluated](), dict[tuple[Asked, str, int | None], evaluation.Evaluated]()
        for asked, base in options.asked:
            result, tokenizer, rows = evaluate(asked, None, None, tasks, options, job)
            other = 0 if tuned else None
            if base is not None:
                # On the very tokens that the tuned model was asked about: with its tokenizer and chat template.
                alike = (base, all_of(tokenizer), rows)
                if alike not in bases:
                    taken = base.name in {known.name for known in bases.values()}
                    base = dataclasses.replace(base, name=f"{base.name}, asked as {asked.name}") if taken else base
                    bases[alike], *_ = evaluate(base, tokenizer, rows, tasks, options, job)
                other = list(bases).index(alike)
            tuned.append(dataclasses.replace(result, compared_with=other))
        results, of_what = [*bases.values(), *tuned], what_rows(options)
        if job.is_main:
            log.info(f"\n{evaluation.describe(results, of_what, options.limit)}")
            for warning in evaluation.find_warnings(results):
                log.warning(warning)
            if options.output_file:
                settings = {name: getattr(options, name) for name in (*TASK_FLAGS, "batch_size")}
                write(Path(options.output_file).expanduser(), evaluation.to_json(results, of_what, settings))


def look_up(options: Namespace, job: Runtime) -> None:
    """Find all models before the first one is loaded; those of the hub come to its cache."""
    names = {"--base_model": {options.base_model} - {None}, "MODEL": {asked.place for asked, _ in options.asked}}
    names["base model"] = {base.place for _, base in options.asked if base} - names["--base_model"]
    with job.node_leader_first():
        for flag, places in names.items():
            for place in sorted(places.difference(BUILT_IN_MODELS)):
                models.local_folder(place, flag, ask_hub=job.local_rank == 0)


def evaluate(
    asked: Asked,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: int | None,
    tasks: evaluation.Tasks | None,
    options: Namespace,
    job: Runtime,
) -> tuple[evaluation.Evaluated, PreTrainedTokenizerBase, int | None]:
    """Load a model and ask it all that is to be known; returns that, the tokenizer that was used, and how many rows
    the model's embedding has.

    Args:
        asked: the model.
        tokenizer: to use in place of its own.
        rows: that its embedding gets, where it has fewer.
        tasks: to ask, or None.
        options: which rows, and how models are loaded.
        job: the ranks.
    """
    opened = open_model(
        str(data.build_demo(data.cache_dir()).model_dir) if asked.place == "demo" else asked.place,
        base_model=options.base_model,
        tokenizer_name=options.tokenizer_name,
        quantization=asked.quantization,
        precision=asked.precision,
        trust_remote_code=options.trust_remote_code,
        enable_fsdp=options.enable_fsdp,
        job=job,
        rows=rows,
        tokenizer=tokenizer,
    )
    log.info(opened.about)
    tokenizer, rows = tokenizer or opened.tokenizer, models.vocabulary_size(opened.model.config)
    held_out, answers = None, None
    if options.rows != "none":
        config, split = options.config, options.split
        held_out = evaluation.measure(opened.model, tokenizer, config, split, asked.resized, asked.place, job)
    if tasks is not None:
        answers = tasks.ask(opened.model, tokenizer, options.enable_fsdp, job)
    result = evaluation.Evaluated(asked.name, opened.about, held_out, answers)
    del opened
    gc.collect()  # before the next one is loaded
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return result, tokenizer, rows


def all_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides what tokens it makes of a chat."""
    tokenizer("")  # the backend's text holds its last truncation and padding, too: a plain call resets them
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(tokenizer.get_vocab())
    return f"{backend} {tokenizer.special_tokens_map} {tokenizer.chat_template}"


def what_rows(options: Namespace) -> str:
    """What the loss was measured on, in words."""
    settings = options.config.data
    named = settings.dataset if isinstance(settings.dataset, str) else "a mix"
    if options.rows == "all":
        return f"all rows of {named}"
    run = next(iter(options.runs), None) if options.dataset is None else None
    which = f"the rows that {run} held out" if run else f"the rows that a run on {named} holds out"
    return f"{which} (--validation {settings.validation})" if settings.validation else which


def write(file: Path, results: dict[str, object]) -> None:
    """Write the results, whole or not at all."""
    aside = file.with_name(f".{file.name}.writing")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
        os.replace(aside, file)
    except OSError as error:
        raise RunFailure(f"--output_file {file}: cannot be written ({error.strerror}).") from error
    log.info(f"\nResults: {file}")


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(OPTIONS)
