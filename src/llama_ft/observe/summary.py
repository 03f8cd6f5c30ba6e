"""The summary that a run prints at its end: results, files, and the commands for the next steps."""

import math
import os
import shlex
import sys
from pathlib import Path

from llama_ft.config import Config


def summary(
    config: Config,
    run: Path,
    recipes: Path,
    ended: str,
    seconds: float,
    best: tuple[float, int],
    weights_of: int,
    has_validation: bool,
) -> str:
    """Return an empty line and at most six lines. Their commands can be copied into a shell.

    Args:
        config: the run's settings.
        run: its directory.
        recipes: the directory of inference.py, evaluate.py and export.py.
        ended: the last step and the reason for the end.
        seconds: since the start of this launch.
        best: the best validation loss (infinite if there is none) and its step.
        weights_of: the step of the weights in model/.
        has_validation: the run has a validation set, for which evaluate.py can compute the loss.
    """
    is_adapter = config.peft.use_peft
    has_model = config.checkpoint.save_model
    python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd()) else "python"

    def command(recipe: str, *words: str) -> str:
        return shlex.join([python, os.path.relpath(recipes / recipe), str(run), *words])

    held = f"The fine-tuned {'adapter' if is_adapter else 'model'} of step {weights_of}: {run / 'model'}"
    lines = [f"Training ended after {ended}. The run took {time_text(seconds)}."]
    lines += [f"Best validation loss: {best[0]:.4g} at step {best[1]}"] * math.isfinite(best[0])
    lines += [
        f"{held if has_model else f'No model was saved: {run}'} (report: {run / 'report.html'})"
    ]
    if has_model:
        to = ["--merge"] if is_adapter else ["--save_dtype", "bfloat16"]
        if config.preference.objective == "reward":
            lines += [f"Score responses with it: {command('inference.py', '--prompts', 'FILE')}"]
        else:
            lines += [f"Chat with it: {command('inference.py')}"]
            lines += [f"Evaluate it: {command('evaluate.py', '--base')}"] * has_validation
        lines += [
            f"{'Merge' if is_adapter else 'Export'} it: {command('export.py', f'{run}-exported', *to)}"
        ]
    return "\n".join(["", *lines])


def time_text(seconds: float) -> str:
    """Return a duration as text: `63 ms`, `5.2 s`, `14 min`, `3.5 h`."""
    for size, name, least in ((3600, "h", 5400), (60, "min", 90), (1, "s", 1)):
        if seconds >= least:
            return f"{seconds / size:,.{0 if seconds >= 10 * size else 1}f} {name}"
    return f"{seconds * 1000:.0f} ms"
