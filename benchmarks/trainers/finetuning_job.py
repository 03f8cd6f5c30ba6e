"""One run of recipes/finetuning.py, started by torchrun for throughput.py. The first argument is a
directory, the others are the recipe's flags.

Each rank writes before-RANK.json into the directory: its process id and its anonymous memory just
before the model is built, when Python and the libraries are loaded and samples are tokenized.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

from benchmarks.shared.process_memory import anonymous_bytes

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def main(folder: Path, flags: list[str]) -> None:
    sys.path.insert(0, str(RECIPES))
    import finetuning
    import fire

    build_model = finetuning.build_model
    file = folder / f"before-{os.environ['RANK']}.json"
    pid = os.getpid()

    def measured(*args: Any) -> Any:
        # a plan builds the model, too, in a process of its own
        if os.getpid() == pid and not file.exists():
            file.write_text(json.dumps({"pid": pid, "bytes": anonymous_bytes()}))
        return build_model(*args)

    finetuning.build_model = measured
    sys.argv = [finetuning.__file__, *flags]
    fire.Fire(finetuning.main)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
