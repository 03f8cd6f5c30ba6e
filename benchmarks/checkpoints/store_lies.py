"""Resume runs from an S3 server that gives wrong answers, and check that no checkpoint is lost.

    python benchmarks/checkpoints/store_lies.py --lies 60

It needs moto[server] and s3fs. A run of benchmarks/checkpoints/crash.py is uploaded, and its last checkpoint and
its result are deleted, as if it had been killed. For each lie, a copy of its prefix is resumed with
--resume auto on an empty disk. One to four answers of one kind of request (list, head, get, put,
delete) are wrong: empty, stale, truncated, HTML, 403, 404, 500, another ETag.

A run may fail with a message. It must not start from step 1, print a traceback, be silent for a
minute, or change a checkpoint: all of them must be there and verify. With the same command and right
answers, the run must then end with the log and the model of the run that nobody disturbed.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "tests")]

from forked import start_forked

from benchmarks.checkpoints import crash  # which makes llama_ft importable
from benchmarks.checkpoints.lying_store import Lie, LyingServer, random_lies
from llama_ft.extensions.store.object_store import (
    COMMIT_FILE,
    ObjectStore,
    commit_name,
    read_commits,
    stored_file,
)

RECIPE = crash.REPOSITORY / "recipes" / "finetuning.py"
SECONDS = 600  # for a launch
SECONDS_OF_SILENCE = 60


class Inputs:
    """Model, data, and the objects of a run that was killed before its last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        crash.write_inputs(folder)
        self.whole = folder / "whole"
        code, _ = self.launch("whole", "s3://runs/whole")
        if code != 0:
            raise SystemExit(self.log("whole").read_text())
        store = ObjectStore("s3://runs/whole", "")
        last = commit_name(max(read_commits(store))).removesuffix(COMMIT_FILE)
        self.objects = {
            name: store.get_text(name) if name.endswith(("json", "txt", "jsonl")) else None
            for name in store.sizes("")
            if name.startswith("checkpoints/") and not name.startswith(last)
        }
        self.source = store
        if not any(name.endswith(COMMIT_FILE) for name in self.objects):
            raise SystemExit("the undisturbed run has uploaded one checkpoint only")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def launch(self, name: str, url: str) -> tuple[int | None, float]:
        """Run the recipe on an empty disk. Return its exit code, and the longest time without a
        line."""
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        words = [*crash.FLAGS, "--no_plan", "--keep_last", "0", "--num_epochs", "1"]
        words += ["--model_name", f"{self.folder}/model", "--dataset", f"{self.folder}/rows.jsonl"]
        cache = {"LLAMA_FT_CACHE": f"{self.folder}/cache"}
        log = self.log(name)
        log.write_text("")
        words += ["--output_dir", str(run), "--save_to", url]
        running = start_forked(RECIPE, *words, output=log, ranks=1, **cache)
        started = time.monotonic()
        last_line = started
        silent = 0.0
        size = 0
        while running.is_alive() and time.monotonic() < started + SECONDS:
            time.sleep(0.2)
            if log.stat().st_size != size:
                size = log.stat().st_size
                last_line = time.monotonic()
            silent = max(silent, time.monotonic() - last_line)
        return running.wait(1), silent

    def copy_to(self, url: str) -> ObjectStore:
        """Copy the objects of the run that was killed."""
        store = ObjectStore(url, "")
        file = self.folder / "object"
        for name, text in self.objects.items():
            if text is not None:
                store.put_text(text, name)
            else:
                self.source.get_file(name, file)
                store.put_file(file, name)
        return store


def lost_checkpoints(store: ObjectStore, inputs: Inputs) -> list[str]:
    """Return which of the checkpoints that were there are gone, or differ from their commit."""
    problems = []
    commits = read_commits(store)
    file = inputs.folder / "object"
    for name in inputs.objects:
        if not name.endswith(COMMIT_FILE):
            continue
        step = int(name.split("/")[1].removeprefix("step-"))
        if step not in commits:
            problems.append(f"{name} is gone")
            continue
        for part, expected in commits[step].files.items():
            store.get_file(name.removesuffix(COMMIT_FILE) + part, file)
            if stored_file(file) != expected:
                problems.append(f"{part} of {name} does not verify")
    return problems


def resume_with_lie(
    inputs: Inputs, server: LyingServer, number: int, lie: Lie
) -> tuple[str, list[str]]:
    """Resume a copy of the run. Return how it ended, and what is wrong."""
    url = f"s3://runs/lie-{number}"
    store = inputs.copy_to(url)
    server.tell(lie)
    code, silent = inputs.launch("run", url)
    told = server.lies
    server.tell(None)
    output = inputs.log("run").read_text()
    problems = lost_checkpoints(store, inputs)
    if "step 1/" in output or "Starting from scratch" in output:
        problems.append("it started from step 1")
    if "Traceback" in output:
        problems.append("it printed a traceback")
    if code not in (0, 1, 2):
        problems.append(f"its exit code is {code}")
    if silent > SECONDS_OF_SILENCE:
        problems.append(f"it was silent for {silent:.0f} s")
    if code != 0 and "error: " not in output:
        problems.append("it ended without a message")
    again, _ = inputs.launch("run", url)
    if again != 0:
        problems.append(f"with right answers its exit code is {again}")
    elif not any("was finished" in line for line in inputs.log("run").read_text().splitlines()):
        problems += crash.differences(inputs.folder / "run", inputs.whole, all_checkpoints=False)
    print(
        f"{number + 1}: {lie.kind} {lie.request} x {lie.times} after {lie.after}, {told} told: exit code {code}, "
        f"silent for at most {silent:.0f} s; {'; '.join(problems) or 'nothing lost'}",
        flush=True,
    )
    if problems:
        print(output[-4000:])
    if not told:
        return "not asked", problems
    return "finished" if code == 0 else "failed with a message", problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lies", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the lie to start with")
    parser.add_argument("--folder", help="for the runs; a temporary one by default")
    asked = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = "0"  # as in benchmarks/checkpoints/store_crash.py
    server = LyingServer()
    folder = Path(tempfile.mkdtemp(prefix="store-lies-", dir=asked.folder))
    inputs = Inputs(folder)
    counts = Counter[str]()
    wrong = 0
    for number, lie in enumerate(random_lies(asked.lies, asked.seed)):
        if number < asked.first:
            continue
        ending, problems = resume_with_lie(inputs, server, number, lie)
        counts[ending] += 1
        wrong += bool(problems)
    shutil.rmtree(folder)
    print(f"{sum(counts.values())} lies: {dict(counts)}, {wrong} with a problem")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
