"""The summary that a run prints at its end: results, files, and the commands for the next steps."""

import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from llama_ft.config import Config
from llama_ft.config.newest_run import is_newest
from llama_ft.config.wording.messages import time_text

VERBS = {"inference.py": "chat", "evaluate.py": "evaluate", "export.py": "export"}  # of llama-ft


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run has ended.

    Attributes:
        ended: the last step and the reason for the end.
        seconds: since the start of this launch.
        best_of: name of the metric that chooses the best checkpoint.
        best_value: its best value; infinite if there is none.
        best_step: its step.
        weights_of: the step of the weights in model/.
        leaks: why this value is too low.
        has_validation: the run has a validation set, for which evaluate.py can compute the loss.
        further_lines: of parts of the run, such as its uploads.
    """

    ended: str
    seconds: float
    best_of: str
    best_value: float
    best_step: int
    weights_of: int
    has_validation: bool
    leaks: tuple[str, ...] = ()
    further_lines: tuple[str, ...] = ()


def summary(config: Config, run: Path, recipes: Path, outcome: RunOutcome) -> str:
    """Return an empty line and at most seven lines, and the leaks. Their commands can be copied into a shell.

    Args:
        config: the run's settings.
        run: its directory.
        recipes: the directory of inference.py, evaluate.py and export.py.
        outcome: how the run has ended.
    """
    is_adapter = config.peft.use_peft
    has_model = config.checkpoint.save_model
    python = "python"
    if sys.executable.startswith(os.getcwd()):  # of a virtual environment in this directory
        python = os.path.relpath(sys.executable)

    def command(recipe: str, *words: str) -> str:
        if Path(sys.argv[0]).name.startswith("llama-ft "):  # see commands.py
            return shlex.join(["llama-ft", VERBS[recipe], *words])
        script = os.path.relpath(recipes / recipe)
        return shlex.join([python, script, *words])

    # chat and evaluate take the newest run if none is named
    named = [] if is_newest(run) else [str(run)]

    took = time_text(outcome.seconds)
    lines = ["", f"Training ended after {outcome.ended}. The run took {took}."]
    if math.isfinite(outcome.best_value):
        best = f"{outcome.best_value:.4g} at step {outcome.best_step}"
        lines.append(f"Best {outcome.best_of}: {best}")
        lines += [f"warning: {leak}" for leak in outcome.leaks]
    lines += outcome.further_lines
    report = f"(report: {run / 'report.html'})"
    if not has_model:
        lines.append(f"No model was saved: {run} {report}")
        return "\n".join(lines)
    kind = "adapter" if is_adapter else "model"
    lines.append(f"The fine-tuned {kind} of step {outcome.weights_of}: {run / 'model'} {report}")
    if config.preference.entry.has_score:
        lines.append(
            f"Score responses with it: {command('inference.py', *named, '--prompts', 'FILE')}"
        )
    else:
        lines.append(f"Chat with it: {command('inference.py', *named)}")
        # of generated answers the run itself has measured the rewards
        if outcome.has_validation and config.preference.entry.make_steps is None:
            lines.append(f"Evaluate it: {command('evaluate.py', *named, '--base')}")
    exported = f"{run}-exported"
    if is_adapter:
        lines.append(f"Merge it: {command('export.py', str(run), exported, '--merge')}")
    else:
        lines.append(
            f"Export it: {command('export.py', str(run), exported, '--save_dtype', 'bfloat16')}"
        )
    return "\n".join(lines)
