"""The summary that a run prints at its end: results, files, and the commands for the next steps."""

import math
import os
import shlex
import sys
from pathlib import Path

from llama_ft.config import Config

# seconds, name, and the shortest duration that is printed in this unit
TIME_UNITS = (
    (3600, "h", 5400),
    (60, "min", 90),
    (1, "s", 1),
)


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
    best_loss, best_step = best
    python = "python"
    if sys.executable.startswith(os.getcwd()):  # of a virtual environment in this directory
        python = os.path.relpath(sys.executable)

    def command(recipe: str, *words: str) -> str:
        script = os.path.relpath(recipes / recipe)
        return shlex.join([python, script, str(run), *words])

    lines = ["", f"Training ended after {ended}. The run took {time_text(seconds)}."]
    if math.isfinite(best_loss):
        lines.append(f"Best validation loss: {best_loss:.4g} at step {best_step}")
    report = f"(report: {run / 'report.html'})"
    if not has_model:
        lines.append(f"No model was saved: {run} {report}")
        return "\n".join(lines)
    kind = "adapter" if is_adapter else "model"
    lines.append(f"The fine-tuned {kind} of step {weights_of}: {run / 'model'} {report}")
    if config.preference.objective == "reward":
        lines.append(f"Score responses with it: {command('inference.py', '--prompts', 'FILE')}")
    else:
        lines.append(f"Chat with it: {command('inference.py')}")
        if has_validation:
            lines.append(f"Evaluate it: {command('evaluate.py', '--base')}")
    exported = f"{run}-exported"
    if is_adapter:
        lines.append(f"Merge it: {command('export.py', exported, '--merge')}")
    else:
        lines.append(f"Export it: {command('export.py', exported, '--save_dtype', 'bfloat16')}")
    return "\n".join(lines)


def time_text(seconds: float) -> str:
    """Return a duration as text: `63 ms`, `5.2 s`, `14 min`, `3.5 h`."""
    for size, name, least in TIME_UNITS:
        if seconds >= least:
            digits = 0 if seconds >= 10 * size else 1
            return f"{seconds / size:,.{digits}f} {name}"
    return f"{seconds * 1000:.0f} ms"
