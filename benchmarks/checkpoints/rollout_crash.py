"""Kill runs with --objective grpo with SIGKILL many times, resume them, and compare them with an
uninterrupted run.

    python benchmarks/checkpoints/rollout_crash.py --kills 20
    python benchmarks/checkpoints/rollout_crash.py --kills 20 --server

A tiny model with dropout and an adapter trains for 9 steps, two on each round of 12 answers, and saves
after every third step. It generates itself, in turn on one rank and on two that share the weights.
With --server, a server of the tests answers, which computes with PEFT, in turn with --staleness 0 and 1.
Each launch is killed at a random moment: while it loads, or a bit after something has appeared: answers,
a round, a line in metrics.jsonl, a checkpoint. Then --resume auto continues until the run is done. Runs
follow until the number of kills is reached. They are forks of a process that has imported torch, as in
the tests.

After every kill each checkpoint and each round must be valid. No complete round is written again, and
with --server none of its answers is asked for. At the end the rounds, metrics.jsonl without perf/ and
memory/, the adapter and the checkpoints must be equal to those of the uninterrupted run, to the last
byte, and nothing else may be left. Any difference is printed, and the exit code is 1.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "tests")]

from forked import Running, start_forked
from local_server import serve
from lora_server import LoraServer

from benchmarks.checkpoints import crash, store_crash
from llama_ft.checkpoint import complete_checkpoints
from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.rounds import list_rounds, read_round

FLAGS = (
    "--objective grpo --use_peft --peft.r 8 --lora_dropout 0.1 --lr 2e-2 --lr_scheduler constant --precision fp32 "
    "--device cpu --batch_size_training 5 --num_generations 4 --prompts_per_step 3 --generate_batch_size 5 "
    "--max_completion_length 8 --num_iterations 2 --max_train_step 9 --save_steps 3 --no_plan --resume auto"
).split()
PROMPTS = 15
REWARD = """
def score(prompt, answer, sample):
    return sum(letter.islower() for letter in answer) / 8
"""
# of launches that are killed while they load
LOADING_SHARE = 0.15
MOST_EVENTS = 14  # before a kill
MOST_SECONDS = 0.1  # after the last of them
SECONDS = 300.0  # for a launch that is not killed
POLL_SECONDS = 0.002


class Variant(NamedTuple):
    """A kind of run. `ranks`: 0 without a launcher."""

    name: str
    ranks: int
    flags: list[str]


@contextmanager
def variants(inputs: Path, with_server: bool) -> Iterator[tuple[list[Variant], LoraServer | None]]:
    """Yield the kinds of runs, and their server."""
    if not with_server:
        yield [Variant("one-rank", 0, []), Variant("two-ranks", 2, ["--enable_fsdp"])], None
        return
    server = LoraServer(inputs / "model")
    with serve(server.answer) as url:
        asks = ["--server", url, "--server_timeout", "60s"]
        late = [*asks, "--staleness", "1"]
        yield [Variant("staleness-0", 0, asks), Variant("staleness-1", 0, late)], server


def write_inputs(inputs: Path) -> None:
    """The model of crash.py, prompts and a reward."""
    crash.write_inputs(inputs)
    (inputs / "reward.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"Number {number}?"}) + "\n" for number in range(PROMPTS)]
    (inputs / "prompts.jsonl").write_text("".join(lines))


def launch(inputs: Path, run: Path, variant: Variant) -> Running:
    words = [*FLAGS, *variant.flags, "--model_name", inputs / "model", "--output_dir", run]
    words += ["--dataset", inputs / "prompts.jsonl", "--reward", f"{inputs}/reward.py:score"]
    recipe = REPOSITORY / "recipes" / "finetuning.py"
    log = run.with_suffix(".log")
    cache = str(inputs / "cache")
    return start_forked(recipe, *words, output=log, ranks=variant.ranks, LLAMA_FT_CACHE=cache)


def events(run: Path) -> set[str]:
    """What has appeared in a run's directory so far."""
    names = {
        path.name for folder in ("rollouts", "checkpoints") for path in (run / folder).glob("*")
    }
    return names | {f"line {number}" for number in range(crash.count_lines(run))}


def wait_for(running: Running, happens: Callable[[], bool]) -> bool:
    """Return False if the launch ended before."""
    while not happens():
        if not running.is_alive():
            return False
        time.sleep(POLL_SECONDS)
    return True


def reaches(running: Running, run: Path, startup_seconds: float, chance: random.Random) -> bool:
    """Wait for a random moment; False if the launch ended before."""
    if chance.random() < LOADING_SHARE:
        wanted = time.monotonic() + chance.uniform(0, startup_seconds)
        return wait_for(running, lambda: time.monotonic() > wanted)
    before = events(run)
    seen = set(before)
    count = chance.randint(1, MOST_EVENTS)

    def has_happened() -> bool:
        seen.update(events(run))
        return len(seen) - len(before) >= count

    is_reached = wait_for(running, has_happened)
    return is_reached and crash.pause(chance.uniform(0, MOST_SECONDS))


def moment(run: Path) -> str:
    """What a run was doing when it was killed, by what it has left."""
    names = [path.name for path in (run / "rollouts").glob("*")]
    if list((run / "checkpoints").glob(".writing-*")):
        return "saving"
    if any(name.endswith(".tmp") for name in names):
        return "writing answers"
    if any(name.startswith("unscored-") for name in names):
        return "scoring"
    return "generating or training" if names or crash.count_lines(run) else "loading"


def answers_of(run: Path) -> tuple[dict[str, int], set[int], list[str]]:
    """Return the times of the complete rounds by name, the seeds of their answers, and what is wrong
    with them."""
    times = dict[str, int]()
    seeds = set[int]()
    problems = list[str]()
    for folder in list_rounds(run):
        try:
            rollouts = read_round(folder)
        except UserError as error:
            problems.append(str(error))
            continue
        times[folder.name] = (folder / "samples.safetensors").stat().st_mtime_ns
        seeds |= {answer.seed for group in rollouts.answers for answer in group}
    return times, seeds, problems


def differences(run: Path, reference: Path) -> list[str]:
    """What a finished run has otherwise than the one that was never stopped."""
    found = crash.differences(run, reference)
    folders = [path / "rollouts" for path in (run, reference)]
    names = {file for folder in folders for file in crash.relative_files(folder, folder)}
    for name in sorted(names):
        mine, theirs = (folder / name for folder in folders)
        if not (mine.exists() and theirs.exists()):
            found.append(f"rollouts/{name}: only one of the runs has it")
        elif mine.read_bytes() != theirs.read_bytes():
            found.append(f"rollouts/{name} differs")
    return found


class Crashes:
    """Runs that are killed until there were enough kills; `counts` is for the report."""

    def __init__(self, inputs: Path, server: LoraServer | None, kills: int, seed: int) -> None:
        self.inputs = inputs
        self.server = server
        self.wanted = kills
        self.chance = random.Random(seed)
        self.kills = 0
        self.counts = Counter[str]()

    def reference_run(self, variant: Variant) -> tuple[Path, float]:
        """Return a run that nobody disturbs, and the seconds until it logs its first line."""
        run = self.inputs / f"{variant.name}-uninterrupted"
        started = time.monotonic()
        running = launch(self.inputs, run, variant)
        wait_for(running, lambda: crash.count_lines(run) > 0)
        startup_seconds = time.monotonic() - started
        if running.wait(SECONDS) != 0:
            raise SystemExit(run.with_suffix(".log").read_text())
        return run, startup_seconds

    def finish_run(self, run: Path, variant: Variant, startup_seconds: float) -> list[str]:
        """Kill and resume until it is done; return what is wrong."""
        while True:
            times, seeds, _ = answers_of(run)
            if self.server is not None:
                self.server.requests.clear()
            running = launch(self.inputs, run, variant)
            is_killed = (
                self.kills < self.wanted
                and reaches(running, run, startup_seconds, self.chance)
                and store_crash.kill_ranks(running, self.chance)
            )
            if not is_killed and running.wait(SECONDS) != 0:
                return [
                    f"a launch failed that was not killed:\n{run.with_suffix('.log').read_text()}"
                ]
            if problems := self.wrong(run, times, seeds):
                return problems
            if not is_killed:
                return []
            self.kills += 1
            self.report(run, variant)

    def wrong(self, run: Path, times: dict[str, int], seeds: set[int]) -> list[str]:
        """Return what is wrong after a launch. `times` and `seeds`: of `answers_of` before it."""
        now, _, problems = answers_of(run)
        again = [name for name, changed in times.items() if now.get(name) != changed]
        problems += [f"round {name} was written again" for name in again]
        if self.server is not None:
            requests: list[dict[str, Any]] = self.server.requests
            asked = {one["seed"] for one in requests if "-policy-0" in one["model"]}
            if asked & seeds:
                problems.append("answers of complete rounds were asked for again")
        return problems + crash.unsound(run)

    def report(self, run: Path, variant: Variant) -> None:
        doing = moment(run)
        self.counts.update({doing, variant.name})
        rounds = len(list_rounds(run))
        newest = next(iter(complete_checkpoints(run)), Path("no checkpoint")).name
        text = f"{variant.name}, {doing}; {rounds} rounds, {newest}, {crash.count_lines(run)} lines"
        print(f"kill {self.kills} of {self.wanted}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--server", action="store_true", help="answers are a server's")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", help="for the runs; a temporary one by default")
    asked = parser.parse_args()
    inputs = Path(tempfile.mkdtemp(prefix="rollout-crash-", dir=asked.folder))
    write_inputs(inputs)
    runs = 0
    with variants(inputs, asked.server) as (kinds, server):
        crashes = Crashes(inputs, server, asked.kills, asked.seed)
        references = {kind.name: crashes.reference_run(kind) for kind in kinds}
        while crashes.kills < crashes.wanted:
            kind = kinds[runs % len(kinds)]
            run = inputs / f"run-{runs}"
            reference, startup_seconds = references[kind.name]
            problems = crashes.finish_run(run, kind, startup_seconds)
            problems = problems or differences(run, reference)
            if problems:
                raise SystemExit("\n".join([*problems, f"{run} is not {reference}; both are kept"]))
            shutil.rmtree(run)
            runs += 1
            print(f"run {runs} ({kind.name}) is identical to the uninterrupted one", flush=True)
    shutil.rmtree(inputs)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(crashes.counts.items()))
    print(f"{crashes.kills} kills in {runs} runs ({counts}): every run identical.")


if __name__ == "__main__":
    main()
