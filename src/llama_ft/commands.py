"""The console scripts llama-ft-finetune, llama-ft-plan and so on: each runs the recipe that it is named after.

After `pip install -e .` that is the repository's own recipes/*.py, which people edit; a plain install has a copy of
recipes/ and configs/ inside the package. Nothing heavy is imported here.
"""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

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
