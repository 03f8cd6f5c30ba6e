"""Start a run while its predecessor in the same directory still steps, saves, exports or is killed,
and check that no complete checkpoint is lost.

    python benchmarks/checkpoints/successors.py --cases 50

All are recipes/finetuning.py on 2 ranks with --resume auto, as schedulers start them: a predecessor
gets SIGTERM, is killed, or ends by itself, and one or two successors start at a random
moment before or after. Each rank takes its own random time to write its file of a checkpoint, and to
load weights. The ranks are forks of a process that has imported torch, as in the tests.

While they run, another thread looks at the directory: a checkpoint that was complete must stay
there, valid and under its name, because a successor resumes from the newest. In the end the log and
the final model must be equal to those of a run that nobody disturbed. Any difference is printed, and
the exit code is 1.
"""

import argparse
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "tests")]

from forked import Running, start_forked

from benchmarks.checkpoints import crash

RECIPE = crash.REPOSITORY / "recipes" / "finetuning.py"
FLAGS = (
    "--enable_fsdp --precision fp32 --lr 1e-2 --batch_size_training 2 --gradient_accumulation_steps 2 --num_epochs 2 "
    "--run_validation false --context_length 64 --device cpu --plan_memory false --save_every_epoch false "
    "--resume auto"
).split()
STEP_SECONDS = 0.1
LIMIT_SECONDS = 300.0
IN_USE = "in use by another process"


class Case(NamedTuple):
    """How two runs overlap."""

    save_steps: int
    write_seconds: tuple[float, float]  # of each rank's file of a checkpoint
    load_seconds: float
    export_seconds: float
    ends: str  # how the predecessor does: SIGTERM, SIGKILL or "by itself"
    ends_at: str  # "load", "steps" or "save"
    delay: float  # between that and the start of the first successor
    successors: int

    @classmethod
    def draw(cls, chance: random.Random) -> "Case":
        ends = chance.choices(["SIGTERM", "SIGKILL", "by itself"], [6, 2, 2])[0]
        return cls(
            save_steps=chance.choice([3, 100_000]),
            write_seconds=(chance.uniform(0, 4), chance.uniform(0, 4)),
            load_seconds=chance.uniform(0, 4),
            export_seconds=chance.uniform(0, 3),
            ends=ends,
            ends_at="steps" if ends == "by itself" else chance.choice(["load", "steps", "save"]),
            delay=chance.uniform(-2, 3),
            successors=chance.choice([1, 1, 2]),
        )


class Watch:
    """Looks at a run's checkpoints until it is closed. `seen` are the names that were complete."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.seen = set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.seen |= {path.name for path in crash.complete_checkpoints(self.run)}

    def close(self) -> list[str]:
        """Return what is wrong with the checkpoints that were seen."""
        self._ended.set()
        self._thread.join()
        there = {path.name for path in crash.complete_checkpoints(self.run)}
        lost = [f"{name} was complete and is not there" for name in sorted(self.seen - there)]
        return lost + crash.unsound(self.run)


def slow_down() -> None:
    """Make this rank slow where a case says so, before it runs the recipe."""
    from llama_ft import export, models
    from llama_ft.checkpoint.writer import _ShardWriter
    from llama_ft.run import TrainingRun

    def delayed(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def later(*words: Any, **more: Any) -> Any:
            time.sleep(seconds)
            return function(*words, **more)

        setattr(owner, name, later)

    rank = int(os.environ["RANK"])
    delayed(_ShardWriter, "write_data", float(os.environ["WRITE_SECONDS"].split()[rank]))
    delayed(models, "load_weights", float(os.environ["LOAD_SECONDS"]))
    delayed(export, "export_model", float(os.environ["EXPORT_SECONDS"]))
    delayed(TrainingRun, "begin_step", STEP_SECONDS)


class Overlap:
    """One case: its processes, in one directory."""

    def __init__(self, inputs: Path, run: Path, case: Case) -> None:
        self.inputs = inputs
        self.run = run
        self.case = case
        self.started = list[tuple[Running, Path]]()

    def start(self) -> Running:
        """Start the same command, as a scheduler does."""
        case = self.case
        log = self.run.with_name(f"{self.run.name}-{len(self.started)}.log")
        words = [*FLAGS, "--save_steps", str(case.save_steps), "--output_dir", str(self.run)]
        words += ["--model_name", str(self.inputs / "model")]
        words += ["--dataset", str(self.inputs / "rows.jsonl")]
        running = start_forked(
            __file__,
            *words,
            output=log,
            ranks=2,
            WRITE_SECONDS=" ".join(map(str, case.write_seconds)),
            LOAD_SECONDS=str(case.load_seconds),
            EXPORT_SECONDS=str(case.export_seconds),
            LLAMA_FT_CACHE=str(self.inputs / "cache"),
        )
        self.started.append((running, log))
        return running

    def play(self) -> list[str]:
        """Start all, wait for all, and finish the run. Return what is wrong."""
        case = self.case
        watch = Watch(self.run)
        first = self.start()
        wait_until(lambda: self._has_come_to(case.ends_at) or not first.is_alive())
        if case.delay < 0:
            self._start_successors()
            time.sleep(-case.delay)
        if case.ends != "by itself":
            first.send(signal.Signals[case.ends])
        if case.delay >= 0:
            time.sleep(case.delay)
            self._start_successors()
        problems = list[str]()
        for running, log in self.started:
            code = running.wait(LIMIT_SECONDS)
            if running is not first and not is_well(code, log):
                problems.append(f"{log}: exit code {code}\n{log.read_text()[-2000:]}")
        if not (self.run / "model").exists():
            running = self.start()
            if running.wait(LIMIT_SECONDS) != 0:
                log = self.started[-1][1]
                problems.append(f"{log}: does not finish the run\n{log.read_text()[-2000:]}")
        return problems + watch.close()

    def _start_successors(self) -> None:
        for _ in range(self.case.successors):
            self.start()

    def _has_come_to(self, moment: str) -> bool:
        if moment == "load":
            return "Settings that differ" in self.started[0][1].read_text()
        if moment == "steps" or self.case.save_steps > 1000:
            return crash.count_lines(self.run) > 1
        return any((self.run / "checkpoints").glob(".writing-*"))


def is_well(code: int | None, log: Path) -> bool:
    """Return whether a successor did its work, or said that another one has the directory."""
    return code == 0 or (code == 2 and IN_USE in log.read_text())


def wait_until(happens: Callable[[], bool]) -> None:
    while not happens():
        time.sleep(crash.POLL_SECONDS)


def check(inputs: Path, run: Path, whole: Path, case: Case) -> list[str]:
    """Play a case, and compare the run with the undisturbed one."""
    problems = Overlap(inputs, run, case).play()
    return problems + crash.differences(run, whole, all_checkpoints=False)


def undisturbed(inputs: Path) -> Path:
    """Return the directory of a run that nobody disturbs."""
    whole = inputs / "whole"
    alone = Case(3, (0, 0), 0, 0, "by itself", "steps", 0, 0)
    problems = Overlap(inputs, whole, alone).play()
    if problems:
        raise SystemExit("\n".join(problems))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="for the runs; a temporary one by default")
    asked = parser.parse_args()
    inputs = Path(tempfile.mkdtemp(prefix="successors-", dir=asked.folder))
    crash.write_inputs(inputs)
    whole = undisturbed(inputs)
    chance = random.Random(asked.seed)
    counts = Counter[str]()
    is_wrong = False
    for number in range(asked.cases):
        case = Case.draw(chance)
        started = time.monotonic()
        problems = check(inputs, inputs / f"run-{number}", whole, case)
        is_wrong = is_wrong or bool(problems)
        counts.update({case.ends, f"at {case.ends_at}"})
        print(f"{number + 1}: {case}, {time.monotonic() - started:.0f} s", *problems, sep="\n  ")
        sys.stdout.flush()
    print(f"{asked.cases} overlaps: {dict(counts)}")
    if is_wrong:
        raise SystemExit(1)
    print("No complete checkpoint was lost, and every run is equal to the undisturbed one.")


if __name__ == "__main__":
    if "WRITE_SECONDS" in os.environ:
        slow_down()
        runpy.run_path(str(RECIPE), run_name="__main__")
    else:
        main()
