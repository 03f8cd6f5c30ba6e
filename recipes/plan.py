"""Say what a run will cost before it is started: the memory of a rank by what holds it, at the peak of each phase.

Takes the recipe and the flags of recipes/finetuning.py, and --nproc. It needs neither a GPU nor the weights, nor the
data: the recipe's own functions run on tensors without storage, as rank 0 of as many ranks as are asked for.
"""

import dataclasses
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from llama_ft.config import Config, ModelConfig
from llama_ft.errors import RunFailure, before_imports, exit_on_error
from llama_ft.plan.flags import PlanFlags, read_plan_flags

DEMO_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"

if __name__ == "__main__":
    with before_imports():
        CONFIG, PLACES, OPTIONS = read_plan_flags(sys.argv[1:], DEMO_CONFIG, str(__doc__))

import torch  # noqa: E402
from finetuning import build_model  # noqa: E402

from llama_ft import data, models  # noqa: E402
from llama_ft.plan.auto_checkpointing import choose_checkpointing, free_bytes, is_open  # noqa: E402
from llama_ft.plan.describe import describe  # noqa: E402
from llama_ft.plan.fit import find_fits  # noqa: E402
from llama_ft.plan.predict import PlanRequest, predict  # noqa: E402
from llama_ft.runtime import configure_console  # noqa: E402


def main(config: Config, places: dict[str, str], options: PlanFlags) -> None:
    """From the settings to the plan on the screen."""
    request = PlanRequest(
        config,
        find_folder(config.model),
        options.nproc,
        options.nproc_per_node or options.nproc,
        device="cpu" if config.train.device == "cpu" else "cuda",
    )
    if config.model.resize_embeddings:
        request = with_new_tokens(request)
    try:
        if is_open(config):
            request, places = with_checkpointing(request, places, options)
        planned = predict(request, build_model, options.quick)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # of the model's own code, mostly
        raise RunFailure(f"This model could not be planned: {type(error).__name__}: {error}") from error
    if not options.json:
        print(describe(planned))
    answer = None
    if options.device:
        tell = partial(print, file=sys.stderr, flush=True)
        answer = find_fits(request, build_model, options.device, planned, options.quick, tell)
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
    request: PlanRequest, places: dict[str, str], options: PlanFlags
) -> tuple[PlanRequest, dict[str, str]]:
    """With what `activation_checkpointing auto` comes to be on the device that is asked about, or on this machine's;
    nobody has set that."""
    here = torch.device(request.device)
    room = options.device.bytes if options.device else free_bytes(here, request.local_world_size)
    choice = choose_checkpointing(request, build_model, room)
    print(choice.why, file=sys.stderr)
    others = {name: place for name, place in places.items() if name != "train.activation_checkpointing"}
    return dataclasses.replace(request, config=choice.config), others


def find_folder(model: ModelConfig) -> Path:
    """The model's folder; from the hub its small files only."""
    if model.model_name == "demo":
        return data.build_demo(data.cache_dir()).model_dir
    return models.local_folder(model.model_name, "--model_name", weights=False)


def with_new_tokens(request: PlanRequest) -> PlanRequest:
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    configure_console(rank=1 if OPTIONS.json else 0)
    with exit_on_error():
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
