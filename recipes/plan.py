"""Say what a run will cost before it is started: the memory of a rank by what holds it, at the peak of each phase.

Takes the recipe and the flags of recipes/finetuning.py, and --nproc. It needs neither a GPU nor the weights, nor the
data: the recipe's own functions run on tensors without storage, as rank 0 of as many ranks as are asked for.
"""

import dataclasses
import gc
import json
import os
import signal
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from llama_ft.config import Config, ModelConfig, exit_with, help_text
from llama_ft.config.plan_flags import plan_help, read_plan_flags
from llama_ft.errors import RunFailure, UserError

DEMO_RECIPE = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"

if __name__ == "__main__":
    # Before the imports below, which take 6 s: --help and most mistakes are answered at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback out of an import
    if {"--help", "-h"} & set(sys.argv):
        print(plan_help(help_text(str(__doc__), script=sys.argv[0])), end="")
        sys.exit(0)
    try:
        CONFIG, PLACES, OPTIONS = read_plan_flags(sys.argv[1:], DEMO_RECIPE)
    except UserError as error:
        exit_with(error)
    gc.disable()  # see finetuning.py

import torch  # noqa: E402
from finetuning import build_model  # noqa: E402

from llama_ft import data, models, plan  # noqa: E402
from llama_ft.runtime import configure_console  # noqa: E402


def main(config: Config, places: dict[str, str], options: Namespace) -> None:
    """From the settings to the plan on the screen."""
    request = plan.PlanRequest(
        config,
        find_folder(config.model),
        options.nproc,
        options.nproc_per_node,
        device="cpu" if config.train.device == "cpu" else "cuda",
    )
    if config.model.resize_embeddings:
        request = with_new_tokens(request)
    try:
        if plan.is_open(config):
            request, places = with_checkpointing(request, places, options)
        planned = plan.predict(request, build_model, options.quick)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # of the model's own code, mostly
        raise RunFailure(f"This model could not be planned: {type(error).__name__}: {error}") from error
    if not options.json:
        print(plan.describe(planned))
    answer = None
    if options.fit:
        tell = partial(print, file=sys.stderr, flush=True)
        answer = plan.find_fits(request, build_model, options.fit, planned, options.quick, tell)
        commands = answer.commands(places, options.recipe)
        if options.fit_out:
            commands = answer.write(Path(options.fit_out))
            if not answer.fits:
                print(f"--fit_out {options.fit_out}: there is no answer to write.", file=sys.stderr)
        if not options.json:
            print("\n" + answer.describe(commands))
    if options.json:
        print(json.dumps({"plan": planned.to_json(), **(answer.to_json() if answer else {})}))


def with_checkpointing(
    request: plan.PlanRequest, places: dict[str, str], options: Namespace
) -> tuple[plan.PlanRequest, dict[str, str]]:
    """With what `activation_checkpointing auto` comes to be on the device that is asked about, or on this machine's;
    nobody has set that."""
    here = torch.device(request.device)
    room = options.fit.bytes if options.fit else plan.free_bytes(here, request.local_world_size)
    choice = plan.choose_checkpointing(request, build_model, room)
    print(choice.why, file=sys.stderr)
    others = {name: place for name, place in places.items() if name != "train.activation_checkpointing"}
    return dataclasses.replace(request, config=choice.config), others


def find_folder(model: ModelConfig) -> Path:
    """The model's folder; from the hub its small files only."""
    if model.model_name == "demo":
        return data.build_demo(data.cache_dir()).model_dir
    return models.local_folder(model.model_name, "--model_name", weights=False)


def with_new_tokens(request: plan.PlanRequest) -> plan.PlanRequest:
    """With the rows that the run's tokenizer makes the embedding grow by."""
    model, folder = request.config.model, request.folder
    tokens = folder
    if model.tokenizer_name is not None:
        tokens = models.local_folder(model.tokenizer_name, "--tokenizer_name", weights=False)
    tokenizer = models.load_tokenizer(tokens, model.trust_remote_code)
    model_config = models.load_model_config(folder, model.trust_remote_code)
    new_tokens = models.find_new_tokens(tokenizer, folder, model_config, model)
    return dataclasses.replace(request, new_tokens=new_tokens)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    configure_console(rank=1 if OPTIONS.json else 0)
    try:
        main(CONFIG, PLACES, OPTIONS)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # of writing the plan: the disk is full
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # the end of Python would write it again
    except RunFailure as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except UserError as error:
        exit_with(error)
