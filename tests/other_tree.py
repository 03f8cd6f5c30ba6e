"""python other_tree.py FOLDER SCRIPT...: run a script with the package below FOLDER/src, as a new interpreter would.

A fork has this tree's package imported. It is forgotten here, with what torch knows of its operators;
so is huggingface_hub, which reads the environment when it is imported. Other libraries stay."""

import runpy
import sys
from pathlib import Path

OWN = Path(__file__).resolve().parent.parent / "src"
FORGOTTEN = ("llama_ft", "huggingface_hub")


def forget() -> None:
    """Make the next import of the packages a new one."""
    from llama_ft.operators import LIBRARY

    LIBRARY._destroy()
    for name in [name for name in sys.modules if name.partition(".")[0] in FORGOTTEN]:
        del sys.modules[name]


if __name__ == "__main__":
    source = Path(sys.argv[1]) / "src"
    sys.argv = sys.argv[2:]
    forget()
    others = [place for place in sys.path[1:] if Path(place) != OWN]
    sys.path = [str(Path(sys.argv[0]).parent), str(source), *others]
    runpy.run_path(sys.argv[0], run_name="__main__")
