"""Plan a run's memory before it starts: a rank's memory by category, at the peak of each phase.

It takes the config and the flags of recipes/finetuning.py, and --nproc. It needs no GPU, no weights
and no data: the recipe's own functions run on tensors without storage, as rank 0 of the requested
number of ranks.
"""

import dataclasses
import json
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

from llama_ft.config import Config, ModelConfig
from llama_ft.errors import RunFailure, before_imports, exit_on_error
from llama_ft.plan.flags import PlanFlags, read_plan_flags

DEMO_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"

if __name__ == "__main__":
    with before_imports():
        CONFIG, _, OPTIONS = read_plan_flags(sys.argv[1:], DEMO_CONFIG, str(__doc__))

import torch  # noqa: E402
from finetuning import RECIPE  # noqa: E402

from llama_ft import data, models, training  # noqa: E402
from llama_ft.data.media import media_reader  # noqa: E402
from llama_ft.plan.free_memory import free_bytes  # noqa: E402
from llama_ft.plan.preflight import resolve_checkpointing  # noqa: E402
from llama_ft.plan.types import PlanRequest, describe  # noqa: E402
from llama_ft.runtime import configure_console  # noqa: E402

with exit_on_error():  # an import fails if torch has changed
    from llama_ft.plan.fit import answer_fit, choose_settings
    from llama_ft.plan.longest import describe_longest, find_longest


def main(config: Config, options: PlanFlags) -> int:
    """Print the plan. Return the exit code: 0; with --fit 3 if only changed settings fit, 4 if none
    does."""
    folder, is_cpu = find_folder(config.model), config.train.device == "cpu"
    config = training.resolve_format(config)
    config = resolve_checkpointing(config, "cpu" if is_cpu else "cuda")
    request = PlanRequest(
        config, folder, options.nproc, options.nproc_per_node or 1, "cpu" if is_cpu else "cuda"
    )
    if options.images:
        media = media_reader().planned(options.images, options.image_tokens)
        request = dataclasses.replace(request, media=media)
    if config.model.resize_embeddings:
        request = with_new_tokens(request)
    report = partial(print, file=sys.stderr, flush=True)
    if config.model.model_name == "demo":
        report("This plans the demo, a small Llama. --config or --model_name plans another model.")
    if options.longest:
        return print_longest(request, options)
    if options.nproc > 1 and not config.fsdp.enable_fsdp:
        report(
            f"warning: each of the {options.nproc} ranks will hold the whole model. --enable_fsdp shards it."
        )
    quick = bool(options.quick)  # resolved by read_plan_flags
    if not quick:
        report("Planning every layer; --quick takes less time ...")
    try:
        device = torch.device(request.device)
        room = options.fit_bytes or free_bytes(device, request.local_world_size)
        original = request.config
        chosen, notes, planned = choose_settings(request, RECIPE, room, quick)
        for note in notes:
            report(note)
        request = dataclasses.replace(request, config=chosen)
    # mostly errors of the model's own code
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunFailure(
            f"This model could not be planned: {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno})"
        ) from error
    values: dict[str, object] = {"plan": dataclasses.asdict(planned)}
    text, exit_code = describe(planned), 0
    if options.fit:
        answer, exit_code, own = answer_fit(request, RECIPE, planned, options, report, original)
        text, values = f"{text}\n\n{answer}", values | own
    print(json.dumps(values) if options.json else text, flush=True)
    return exit_code


def print_longest(request: PlanRequest, options: PlanFlags) -> int:
    """Print the answer to --longest. Return the exit code: 0, or 4 if no length fits."""
    report = partial(print, file=sys.stderr, flush=True)
    rows, is_quadratic = find_longest(request, RECIPE, options, report)
    values = {"longest": [row._asdict() for row in rows], "is_quadratic": is_quadratic}
    text = describe_longest(rows, is_quadratic)
    print(json.dumps(values) if options.json else text, flush=True)
    return 0 if any(row.tokens for row in rows) else 4


def find_folder(model: ModelConfig) -> Path:
    """Return the model's directory. Of a model on the Hub, download only the small files."""
    if model.model_name == "demo":
        return data.build_demo(data.cache_dir()).model_dir
    return models.local_folder(model.model_name, "--model_name", weights=False)


def with_new_tokens(request: PlanRequest) -> PlanRequest:
    """Return the request with the tokens that the run's tokenizer adds to the model's embedding."""
    model, tokens = request.config.model, request.folder
    if model.tokenizer_name is not None:
        tokens = models.local_folder(model.tokenizer_name, "--tokenizer_name", weights=False)
    tokenizer = models.load_tokenizer(tokens, model.trust_remote_code)
    model_config = models.load_model_config(request.folder, model.trust_remote_code)
    new_tokens = models.find_new_tokens(tokenizer, request.folder, model_config, model)
    return dataclasses.replace(request, new_tokens=new_tokens)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    configure_console(rank=1 if OPTIONS.json else 0)
    with exit_on_error():
        try:
            sys.exit(main(CONFIG, OPTIONS))
        except KeyboardInterrupt:
            print("stopped by Ctrl-C", file=sys.stderr)
            sys.exit(130)
        except OSError as error:  # the output cannot be written: the disk is full
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # a normal exit of Python would try to write it again
        except RunFailure as error:
            print(error, file=sys.stderr)
            sys.exit(1)
