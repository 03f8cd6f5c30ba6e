"""Kill runs with SIGKILL while they upload to an S3 server, delete their local directories, resume
them from the bucket, and compare them with an uninterrupted run.

    python benchmarks/checkpoints/store_crash.py --kills 100

It needs moto[server] and s3fs. The runs are those of benchmarks/checkpoints/crash.py on 2 ranks, with --save_to.
Every launch is killed at a random moment of one kind:

    fetch    while it downloads the checkpoint that it resumes from
    upload   while it uploads a checkpoint
    pruning  while it deletes objects of an older one
    export   while it uploads the final model, the log and the report

The S3 server runs in this process and counts the requests of that kind. One of them, chosen at
random, is the moment, before or after the server has served it, and sometimes the kill comes a bit
later. It hits both ranks, one a bit after the other. Then the local directory is deleted, and
--resume auto continues from the bucket until the run is done. Runs follow until the number of kills
is reached. The ranks are forks of a process that has imported torch, as in the tests: a kill takes
seconds, not minutes.

After every kill the newest checkpoint in the bucket must verify: each of its files is downloaded and
has the size and checksum that its commit object names. It must not be older than before. Objects
that belong to somebody else must still be there. At the end metrics.jsonl, best.json, and every byte
of the final model and of the ranks' files in checkpoints must be equal to those of the uninterrupted
run. Any difference is printed, and the exit code is 1.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "tests")]

from forked import Running, start_forked

from benchmarks.checkpoints import crash  # which makes llama_ft importable
from benchmarks.shared.moto_server import Application, start_s3_server
from llama_ft.extensions.store.object_store import (
    COMMIT_FILE,
    ObjectStore,
    commit_name,
    is_uploaded,
    read_commits,
    stored_file,
)

RECIPE = crash.REPOSITORY / "recipes" / "finetuning.py"
# kind -> method and object of the requests that are counted
MOMENTS = {
    "fetch": re.compile(r"GET .*/checkpoints/step-\d+/(?!commit).+"),
    "upload": re.compile(r"PUT .*/checkpoints/step-\d+/.+"),
    "pruning": re.compile(r"(DELETE|POST) .*/checkpoints/step-\d+/.+"),
    "export": re.compile(r"PUT .*/(model/.+|result\.json|[^/]+\.(jsonl|html|yaml))"),
}
WEIGHTS = {"fetch": 1, "upload": 6, "pruning": 3, "export": 3}  # how often each is chosen
MOST_REQUESTS = {"fetch": 8, "upload": 30, "pruning": 24, "export": 14}  # before a kill
MOST_SECONDS = 0.1  # between the moment and the kill, and between the kills of the ranks
SECONDS = 300  # for a launch that is not killed
FOREIGN = ("notes.txt", "checkpoints/notes.txt", "checkpoints/step-000002/notes.txt")


class WatchedServer:
    """An S3 server with the bucket `runs`, which this process and its launches find.

    Attributes:
        reached: set at the moment that `watch` has chosen.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._pattern: re.Pattern[str] | None = None
        self._requests_left = 0
        self._is_before = False
        # peft writes sets into adapter_config.json, in whatever order they have
        os.environ["PYTHONHASHSEED"] = "0"
        start_s3_server(self._watched)

    def watch(self, moment: str, requests: int, is_before: bool) -> None:
        """Set `reached` at one of the requests of a kind, before or after it is served."""
        with self._lock:
            self.reached.clear()
            self._pattern = MOMENTS[moment]
            self._requests_left = requests
            self._is_before = is_before

    def ignore(self) -> None:
        with self._lock:
            self._pattern = None

    def _watched(self, application: Application) -> Application:
        return partial(self._serve, application)

    def _serve(
        self,
        application: Application,
        environ: dict[str, Any],
        start_response: Callable[..., Any],
    ) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        with self._lock:
            is_chosen = self._pattern is not None and bool(self._pattern.fullmatch(request))
            if is_chosen:
                self._requests_left -= 1
                is_chosen = self._requests_left == 0
        if is_chosen and self._is_before:
            self.reached.set()
        response = application(environ, start_response)
        if is_chosen:
            self.reached.set()
        return response


def kill_ranks(running: Running, chance: random.Random) -> bool:
    """SIGKILL to all ranks in a random order. False if all had ended by themselves: at the end,
    rank 0 still uploads the report when the others have left."""
    ranks = list(running.processes)
    chance.shuffle(ranks)
    for process in ranks:
        process.kill()
        time.sleep(chance.choice((0, chance.uniform(0, MOST_SECONDS))))
    running.wait(timeout=60)
    return any(process.exit_code == -signal.SIGKILL for process in ranks)


def corrupted(store: ObjectStore, folder: Path) -> list[str]:
    """Return what is wrong with the newest checkpoint in the store, and with foreign objects."""
    problems = []
    for step, commit in list(read_commits(store).items())[:1]:
        prefix = commit_name(step).removesuffix(COMMIT_FILE)
        for name, expected in commit.files.items():
            file = folder / "object"
            store.get_file(prefix + name, file)
            if stored_file(file) != expected:
                problems.append(f"{prefix}{name} differs from its checksum")
    for name in FOREIGN:
        if store.get_text(name) != name:
            problems.append(f"{name} was changed")
    return problems


def download(store: ObjectStore, folder: Path) -> Path:
    """Copy all objects, which have the layout of a run directory."""
    for name in store.sizes(""):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        store.get_file(name, folder / name)
    return folder


class StoreCrashes:
    """Runs that are killed until there were enough kills; `counts` is for the report."""

    def __init__(self, server: WatchedServer, inputs: Path, kills: int, seed: int) -> None:
        self.server = server
        self.inputs = inputs
        self.wanted = kills
        self.chance = random.Random(seed)
        self.kills = 0
        self.counts = Counter[str]()

    def launch(self, run: Path, method: str, *more: str) -> Running:
        words = [*crash.FLAGS, *crash.method_flags(method, self.inputs), "--no_plan", *more]
        words += ["--model_name", f"{self.inputs}/model", "--dataset", f"{self.inputs}/rows.jsonl"]
        # named here, since forks do not inherit credentials that this process was started with
        own = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        own["LLAMA_FT_CACHE"] = f"{self.inputs}/cache"
        log = run.with_suffix(".log")
        log.write_text("")
        return start_forked(RECIPE, *words, "--output_dir", run, output=log, ranks=2, **own)

    def reference_run(self, method: str) -> Path:
        """A run that nobody disturbs, and that uploads nothing."""
        run = self.inputs / f"{method}-uninterrupted"
        if self.launch(run, method).wait(SECONDS) != 0:
            raise SystemExit(f"The uninterrupted run failed:\n{tail(run)}")
        return run

    def reaches(self, running: Running, moment: str) -> bool:
        """Wait for a random moment of that kind; False if the launch ended before."""
        requests = self.chance.randint(1, MOST_REQUESTS[moment])
        self.server.watch(moment, requests, self.chance.random() < 0.5)
        while not self.server.reached.wait(0.02):
            if not running.is_alive():
                break
        is_reached = self.server.reached.is_set()
        if is_reached:
            time.sleep(self.chance.choice((0, self.chance.uniform(0, MOST_SECONDS))))
        self.server.ignore()
        return is_reached

    def finish_run(self, run: Path, method: str, store: ObjectStore) -> list[str]:
        """Kill and resume until it is done; returns what is wrong."""
        newest = 0
        while True:
            shutil.rmtree(run, ignore_errors=True)
            started = time.monotonic()
            running = self.launch(run, method, "--save_to", store.url)
            [moment] = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
            is_wanted = self.kills < self.wanted
            if not is_wanted or not self.reaches(running, moment):
                if running.wait(SECONDS) != 0:
                    return [f"a launch failed that was not killed:\n{tail(run)}"]
                return []
            if not kill_ranks(running, self.chance):
                if running.wait(SECONDS) != 0:
                    return [f"a launch failed before it was killed:\n{tail(run)}"]
                return []
            self.kills += 1
            self.counts[moment] += 1
            held = max(read_commits(store), default=0)
            seconds = time.monotonic() - started
            print(
                f"kill {self.kills} of {self.wanted}: {method}, {moment}; step {held}, {seconds:.1f} s",
                flush=True,
            )
            problems = corrupted(store, self.inputs)
            if held < newest:
                problems.append(f"step {newest} was in the store, and now {held} is the newest")
            if problems:
                return problems
            newest = held


def tail(run: Path) -> str:
    lines = run.with_suffix(".log").read_text(errors="replace").splitlines(keepends=True)
    return "".join(lines[-60:])


def compare(run: Path, store: ObjectStore, reference: Path) -> list[str]:
    """What the finished run has uploaded otherwise than the uninterrupted one has on its disk."""
    last_step = int(crash.read_metrics(reference)[-1]["step"])
    copy = download(store, run.with_suffix(".copy"))
    found = crash.differences(copy, reference, all_checkpoints=False)
    if not is_uploaded(store, last_step):
        found.append("result.json is missing or names other files")
    found += corrupted(store, run.parent)
    shutil.rmtree(copy)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--methods", default="full,lora")
    parser.add_argument("--folder", help="for the runs; a temporary one by default")
    asked = parser.parse_args()
    methods = asked.methods.split(",")
    inputs = Path(tempfile.mkdtemp(prefix="store-crash-", dir=asked.folder))
    crash.write_inputs(inputs)
    references: dict[str, Path] = {}
    crashes = StoreCrashes(WatchedServer(), inputs, asked.kills, asked.seed)
    runs = 0
    while crashes.kills < crashes.wanted:
        method = methods[runs % len(methods)]
        if method not in references:
            references[method] = crashes.reference_run(method)
        run = inputs / f"run-{runs}"
        store = ObjectStore(f"s3://runs/{run.name}", "")
        for name in FOREIGN:
            store.put_text(name, name)
        problems = crashes.finish_run(run, method, store)
        problems = problems or compare(run, store, references[method])
        if problems:
            raise SystemExit("\n".join([*problems, f"{store.url} is not {references[method]}"]))
        shutil.rmtree(run, ignore_errors=True)
        runs += 1
        print(f"run {runs} ({method}) is identical to the uninterrupted one", flush=True)
    shutil.rmtree(inputs)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(crashes.counts.items()))
    print(
        f"{crashes.kills} kills in {runs} runs ({counts}): the newest checkpoint in the bucket always "
        "verified, and every run is identical to the uninterrupted one."
    )


if __name__ == "__main__":
    main()
