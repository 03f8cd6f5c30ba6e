"""The first rows of a report: one sentence on what the run has achieved, its main numbers, and the
commands for the next steps."""

import shlex
import time
from datetime import UTC, datetime
from typing import NamedTuple

import numpy

from llama_ft.config.attempts import readable_attempts
from llama_ft.config.objectives import OBJECTIVES
from llama_ft.config.wording.messages import size_text, time_text
from llama_ft.errors import plural
from llama_ft.extensions.report.live import Progress, progress_of
from llama_ft.extensions.report.memory import BASE, memory_of
from llama_ft.extensions.report.plot import number
from llama_ft.extensions.report.run import Curve, Run

ALL_TOKENS = 0.98  # of the validation set: the first token of a packed sequence has no loss
SAME_LOSS = 0.002  # a smaller change, as a share, is called none


class Card(NamedTuple):
    """A number at the top of the report."""

    name: str
    value: str
    more: str = ""


class Command(NamedTuple):
    """A command for the next step."""

    purpose: str
    command: str


def verdict_of(run: Run) -> str:
    """Return what the run has achieved in one sentence; "" without a loss."""
    if "train/loss" not in run.curves:
        return ""
    progress = progress_of(run, time.time())
    training = run.facts.get("data", {}).get("train", {})
    about = [run.method + (f" on {run.model}" if run.model else "")]
    if training.get("samples"):
        about.append(plural(training["samples"], "sample"))
    steps = plural(run.step, "step")
    if progress.spent_seconds is not None:
        steps += f" in {time_text(progress.spent_seconds)}"
    hardware = _hardware(run, progress)
    about.append(steps + (f" on {hardware.value}" if hardware else ""))
    results = []
    for key, name in (("eval/loss", "validation loss"), ("eval/score", "score")):
        curve = run.curves.get(key)
        if curve is not None:
            results.append(f"{name} {_change(curve)}{_size(run, key)}{_moment(run, curve)}")
    if not results:
        results.append(
            f"training loss {_change(run.curves['train/loss'])}, without a validation set"
        )
    memory = _memory_card(run)
    if memory is not None:
        plan = f" ({memory.more})" if "planned" in memory.more else ""
        results.append(f"{memory.name[0].lower()}{memory.name[1:]} {memory.value}{plan}")
    return f"{', '.join(about)}: {'; '.join(results)}."


def _change(curve: Curve) -> str:
    first, last = curve.values[0], curve.values[-1]
    if len(curve.values) == 1:
        return number(last)
    if abs(last - first) <= SAME_LOSS * abs(first):
        return f"{number(first)} before and {number(last)} after, no change"
    return f"{'fell' if last < first else 'rose'} from {number(first)} to {number(last)}"


def _moment(run: Run, curve: Curve) -> str:
    """Return when a number was computed, if the run has trained since; else ""."""
    step = curve.steps[-1]
    if step >= run.step:
        return ""
    return " before training" if step == 0 else f" at step {step:,.0f}"


def _size(run: Run, key: str) -> str:
    """Return on how much of the validation set a number was computed."""
    evaluated = run.facts.get("evaluated")
    if not evaluated:
        return ""
    if key == "eval/score":
        return f" over {plural(evaluated['answers'], 'answer')}"
    if not evaluated["of_tokens"]:
        return f" on {plural(evaluated['losses'], 'sample')}"
    data = run.facts.get("data", {})
    sets = [data.get("validation") or {}, *data.get("named", {}).values()]
    in_all = max(sum(one.get("target_tokens", 0) for one in sets), 1)
    if evaluated["losses"] >= ALL_TOKENS * in_all:
        return f" on all {evaluated['losses']:,} tokens"
    return f" on {evaluated['losses']:,} of {in_all:,} tokens"


def cards_of(run: Run, price: float | None = None) -> list[Card]:
    """Return the numbers at the top of the report. `price`: of a GPU per hour."""
    curves = run.curves
    progress = progress_of(run, time.time())
    cards = list[Card]()
    for key, name in (
        ("eval/loss", "Validation loss"),
        ("eval/score", "Score"),
        ("train/loss", "Training loss"),
    ):
        if key in curves:
            cards.append(_result_card(run, key, name))
    hardware = _hardware(run, progress)
    cards += [_time_card(run, progress)] if progress.spent_seconds is not None else []
    cards += [hardware] if hardware else []
    cost = progress.cost(progress.spent_seconds, price)
    if cost is not None:
        cards.append(Card("Cost", f"{cost:,.2f}", f"at {price:g} per GPU hour"))
    total = progress.total_steps
    epochs = f"{curves['epoch'].values[-1]:.2g} epochs" if "epoch" in curves else ""
    cards.append(Card("Steps", f"{run.step:,}" + (f" of {total:,}" if total else ""), epochs))
    for key, name, text in (
        ("perf/tokens_per_second", "Tokens per second", "{:,.0f}"),
        ("perf/mfu", "MFU", "{:.0%}"),
    ):
        if key in curves:
            settled = curves[key].values[len(curves[key].values) // 2 :]
            cards.append(Card(name, text.format(numpy.median(settled)), "median of last half"))
    memory = _memory_card(run)
    return [*cards, memory] if memory else cards


def _memory_card(run: Run) -> Card | None:
    memory = memory_of(run)
    predicted, measured = (max(sizes.values(), default=0.0) for sizes in memory.phases)
    if measured:
        plan = f"planned: {size_text(predicted)}" if predicted else ""
        return Card("Peak GPU memory", size_text(measured), plan)
    if not memory.process:
        return None
    base = memory.process.get(BASE)
    more = f"{size_text(base)} of it before loading" if base else ""
    return Card("Peak host memory", size_text(max(memory.process.values())), more)


def _result_card(run: Run, key: str, name: str) -> Card:
    steps, values = run.curves[key]
    more = list[str]()
    if key.startswith("eval/") and (size := _size(run, key) + _moment(run, run.curves[key])):
        more.append(size.strip())
    if steps[0] == 0 and len(steps) > 1:
        more.append(f"{number(values[0])} before training")
    best, word = (
        (values.argmax(), "highest") if key == "eval/score" else (values.argmin(), "lowest")
    )
    if values[best] != values[-1]:
        more.append(f"{word} {number(values[best])} at step {steps[best]:,.0f}")
    return Card(name, number(values[-1]), "; ".join(more))


def _time_card(run: Run, progress: Progress) -> Card:
    assert progress.spent_seconds is not None and progress.started_at is not None
    launches = len(readable_attempts(run.facts))
    day = f"{datetime.fromtimestamp(progress.started_at, UTC):%Y-%m-%d %H:%M} UTC"
    more = day if launches == 1 else f"{launches} launches, the last {day}"
    return Card("Time", time_text(progress.spent_seconds), more)


def _hardware(run: Run, progress: Progress) -> Card | None:
    """Return the GPUs that the run has used, or the cores of the host."""
    environment = run.facts.get("environment", {})
    gpus = environment.get("GPUs")
    if gpus:
        name = gpus.partition(" x ")[2].rpartition(", CUDA")[0].removeprefix("NVIDIA ")
        return Card("Hardware", f"{progress.ranks} x {name}")
    cores = environment.get("host", "").rpartition(", ")[2]
    if not cores:
        return None
    return Card("Hardware", cores, f"no GPU, {plural(progress.ranks, 'rank')}")


def next_commands(run: Run) -> list[Command]:
    """Return what to do with a run that has a final model."""
    has_model = run.settings.get("checkpoint.save_model", True)
    if run.status.get("state") != "finished" or not has_model:
        return []
    folder = str(run.folder)
    exported = f"{folder}-exported"
    form = ["--merge"] if run.settings.get("peft.use_peft") else ["--save_dtype", "bfloat16"]
    commands = [
        ("Chat", ["chat", folder]),
        ("Compare with the base model", ["evaluate", folder, "--base"]),
        ("Merge" if form == ["--merge"] else "Export", ["export", folder, exported, *form]),
    ]
    objective = OBJECTIVES.get(run.settings.get("preference.objective", ""))
    if objective and objective.has_score:
        commands[0] = ("Score responses", ["chat", folder, "--prompts", "FILE"])
    if "eval/loss" not in run.curves:
        del commands[1]
    lines = [Command(name, shlex.join(["llama-ft", *words])) for name, words in commands]
    return [*lines, Command("Serve", shlex.join(["vllm", "serve", exported]))]
