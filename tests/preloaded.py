"""What the fork server of forked.py imports and computes once, so that no fork has to: the imports of
the scripts, and the tables and templates that a first run makes.

No code of models runs here: autograd's threads do not survive a fork."""

import gc
import importlib
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SCRIPTS = ("finetuning", "evaluate", "export", "inference", "plan")
MODULES = (
    "accelerate.utils.fsdp_utils",
    "transformers.models.llama.modeling_llama",
    # what most runs import at their end, or with an adapter
    "llama_ft.extensions.report.part",
    "llama_ft.extensions.report.write",
    "llama_ft.extensions.serving.part",
    "llama_ft.extensions.serving.probes.part",
    "llama_ft.training.objectives.preferences",
    "peft.tuners.lora.bnb",
)


def preload() -> None:
    sys.path.insert(0, str(RECIPES))  # before the library that is called evaluate, too
    for name in (*MODULES, *SCRIPTS):
        importlib.import_module(name)
    for name in SCRIPTS:
        del sys.modules[name]  # a fork runs its own copy, some of them changed ones
    sys.path.remove(str(RECIPES))

    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from llama_ft.extensions.report.plot import TEMPLATES

    get_checkpoint_conversion_mapping("llama")  # compiles 1,000 expressions: 0.15 s
    for name in TEMPLATES.list_templates(extensions=["html"]):
        TEMPLATES.get_template(name)  # 0.2 s in all


try:
    preload()
except ImportError as error:
    # The server would ignore it, and each fork take 10 s of a core to import all of this again.
    raise RuntimeError(f"tests/preloaded.py: {error}") from error

# A collection in a fork would look at all objects made here, and so copy the pages that they are on.
gc.collect()
gc.freeze()
