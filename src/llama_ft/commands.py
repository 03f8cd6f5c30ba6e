"""The console script: `llama-ft train`, `llama-ft plan` and so on. Each one runs its recipe.

After `pip install -e .` they run the repository's own recipes/*.py, which users edit. A plain
install has a copy inside the package. Nothing slow is imported here.
"""

import logging
import sys
from argparse import ArgumentParser
from difflib import get_close_matches
from types import ModuleType

from llama_ft import __version__, door
from llama_ft.door import Verb
from llama_ft.packaged import PACKAGED

RECIPES = PACKAGED / "recipes"


def _run(recipe: str) -> None:
    """Run recipes/<recipe>.py as __main__, with recipes/ on sys.path and sys.argv unchanged."""
    file = RECIPES / f"{recipe}.py"
    sys.path.insert(0, str(RECIPES))
    main = ModuleType("__main__")
    main.__file__ = str(file)
    # What looks up names in the main module, such as pickle, must find those of the recipe.
    sys.modules["__main__"] = main
    code = compile(file.read_text(), str(file), "exec")
    exec(code, vars(main))


VERBS = {
    "train": Verb(
        "finetuning",
        "Fine-tune a model. --nproc N: on N processes of this machine.",
        takes_nproc=True,
    ),
    "plan": Verb("plan", "Predict the GPU memory of a run."),
    "chat": Verb("inference", "Chat with a model or adapter, or answer a file of prompts."),
    "evaluate": Verb(
        "evaluate", "Measure losses on a dataset, and scores of lm-evaluation-harness."
    ),
    "export": Verb(
        "export", "Export a checkpoint, or merge an adapter, for Transformers, PEFT and vLLM."
    ),
    **door.verbs(),
}
HELP = "Usage: llama-ft VERB [flags]\n\n{}\n\nllama-ft VERB --help lists a verb's flags, --version prints the version."


def main() -> None:
    """Run `llama-ft VERB FLAGS`: the recipe of that verb. `train --nproc N` and `check --nproc N`
    start it with torchrun, as N processes on this machine, and hide torchrun's own report of a
    failed process."""
    verb, *flags = sys.argv[1:] or [""]
    if verb == "--version":
        print(f"llama_ft {__version__}")
    elif verb in ("--help", "-h", "help", ""):
        lines = [f"  {name:10}{entry.about}" for name, entry in VERBS.items()]
        print(HELP.format("\n".join(lines)), file=sys.stdout if verb else sys.stderr)
        sys.exit(0 if verb else 2)
    elif verb not in VERBS:
        names = ", ".join(VERBS)
        similar = get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {similar[0]}?" if similar else ""
        expected = f"expected one of {names}, or --version."
        print(f"error: llama-ft {verb}: {expected}{hint}", file=sys.stderr)
        sys.exit(2)
    elif VERBS[verb].takes_nproc and _has_nproc(flags):
        _launch(verb, flags)
    else:
        sys.argv = [f"{sys.argv[0]} {verb}", *flags]
        _run(VERBS[verb].recipe)


def _has_nproc(flags: list[str]) -> bool:
    return any(flag == "--nproc" or flag.startswith("--nproc=") for flag in flags)


def _launch(verb: str, flags: list[str]) -> None:
    """Run the recipe of a verb with torchrun, on the number of processes in --nproc. The exit code
    is that of the first process that failed."""
    parser = ArgumentParser(
        prog=f"llama-ft {verb}",
        usage=f"llama-ft {verb} --nproc N [flags]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", nargs="?", default="")
    options, flags = parser.parse_known_args(flags)
    number = options.nproc or ""
    if not number.isdecimal() or int(number) < 1:
        wrong = f"--nproc {number}".rstrip()
        print(
            f"error: {wrong}: expected the number of processes, such as one per GPU.",
            file=sys.stderr,
        )
        sys.exit(2)
    if verb == "train":
        _exit_on_wrong_settings(flags)

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("api", "multiprocessing.api"):  # the failing rank has printed the error
        logger = logging.getLogger(f"torch.distributed.elastic.{name}")
        logger.setLevel(logging.CRITICAL)
    recipe = RECIPES / f"{VERBS[verb].recipe}.py"
    try:
        run.main(["--nproc_per_node", number, str(recipe), *flags])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        # -9 after SIGKILL, which shells show as 137
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def _exit_on_wrong_settings(flags: list[str]) -> None:
    """Print the errors of a training's flags before torchrun is imported and starts Python again,
    which takes seconds. Each rank checks them, too."""
    from llama_ft.config import load
    from llama_ft.errors import exit_on_error

    if {"--help", "-h", "--version"}.isdisjoint(flags):
        with exit_on_error():
            load(flags, PACKAGED / "configs" / "demo.yaml")
