"""The console scripts: `llama-ft train`, `llama-ft plan` and so on, and llama-ft-finetune, llama-ft-plan and so on,
each of which runs the recipe that it is named after.

After `pip install -e .` that is the repository's own recipes/*.py, which people edit; a plain install has a copy of
recipes/ and configs/ inside the package. Nothing heavy is imported here.
"""

import logging
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

from llama_ft import __version__

PACKAGE = Path(__file__).resolve().parent
RECIPES = PACKAGE / "recipes" if (PACKAGE / "recipes").is_dir() else PACKAGE.parents[1] / "recipes"  # see setup.py


def _run(recipe: str) -> None:
    """As `python recipes/<recipe>.py` would, beside whose folder's modules it is; sys.argv stays as it is."""
    file = RECIPES / f"{recipe}.py"
    sys.path.insert(0, str(RECIPES))
    main = ModuleType("__main__")
    main.__file__ = str(file)
    sys.modules["__main__"] = main
    exec(compile(file.read_text(), str(file), "exec"), vars(main))


finetune, plan, export, inference, evaluate, report = (
    partial(_run, recipe) for recipe in ("finetuning", "plan", "export", "inference", "evaluate", "report")
)
VERBS = {
    "train": "finetuning",
    "plan": "plan",
    "chat": "inference",
    "evaluate": "evaluate",
    "export": "export",
    "report": "report",
}


def main() -> None:
    """`llama-ft VERB FLAGS`: the recipe of that verb. With `--nproc N` right after `train` it is started by torchrun,
    on so many processes of this machine, without torchrun's own report of a process that failed."""
    verb, *flags = sys.argv[1:] or [""]
    if verb == "--version":
        print(f"llama_ft {__version__}")
    elif verb not in VERBS:
        print(f"llama-ft {verb}: expected one of {', '.join(VERBS)}, or --version.", file=sys.stderr)
        sys.exit(2)
    elif verb == "train" and flags and flags[0].partition("=")[0] == "--nproc":
        _launch(flags[0].split("=")[1:] + flags[1:])  # --nproc 2 or --nproc=2
    else:
        sys.argv = [f"{sys.argv[0]} {verb}", *flags]
        _run(VERBS[verb])


def _launch(words: list[str]) -> None:
    """Run the training recipe under torchrun; `words` begin with the number of processes. Exits as the first process
    that failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("api", "multiprocessing.api"):  # the failing rank has said what went wrong
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    number, *flags = words or [""]
    if not number.isdigit() or number == "0":
        print("llama-ft train --nproc N: expected the number of processes, such as one per GPU.", file=sys.stderr)
        sys.exit(2)
    try:
        run.main(["--nproc_per_node", number, str(RECIPES / "finetuning.py"), *flags])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
