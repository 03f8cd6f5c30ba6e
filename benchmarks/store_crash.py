"""Kill a run with SIGKILL while it uploads to an S3 server, delete its local directory, resume it
from the bucket, and compare it with an uninterrupted run.

    python benchmarks/store_crash.py --kills 100

It needs moto[server] and s3fs. The runs are those of benchmarks/crash.py with --save_to. Each launch
is killed at a random moment: while a checkpoint is uploaded, after an old one was pruned, or while
the final model is uploaded. The kill hits torchrun and both ranks. Then the local directory is
deleted, and --resume auto continues from the bucket until the run is done. Runs follow until the
number of kills is reached.

After every kill the newest checkpoint in the bucket must verify: each of its files is downloaded and
has the size and checksum that its commit object names. It must not be older than before. Objects
that belong to somebody else must still be there. At the end metrics.jsonl, best.json, and every byte
of the final model and of the ranks' files in checkpoints must be equal to those of the uninterrupted
run. Any difference is printed, and the exit code is 1.
"""

import argparse
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import crash  # which makes llama_ft importable
from moto.server import ThreadedMotoServer

from llama_ft.checkpoint import ObjectStore, is_uploaded
from llama_ft.checkpoint.store import COMMIT_FILE, commit_name, read_commits, stored_file

MOMENTS = {"upload": 7, "pruning": 2, "export": 2}  # how often each is chosen
MOST_OBJECTS = 14  # of a launch, after which it is killed in an upload
MOST_SECONDS = 0.1  # between the moment and the kill
FOREIGN = ("notes.txt", "checkpoints/notes.txt", "checkpoints/step-000002/notes.txt")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def start_server() -> ThreadedMotoServer:
    """Start an S3 server with the bucket `runs`, which this process and its launches find."""
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    boto3.client("s3").create_bucket(Bucket="runs")
    return server


def reaches(launch: crash.Launch, moment: str, store: ObjectStore, chance: random.Random) -> bool:
    """Wait for a random moment of that kind; False if the launch ended before."""
    before = store.sizes("").keys()
    objects = chance.randint(1, MOST_OBJECTS)
    seen = set(before)

    def happened() -> bool:
        names = store.sizes("").keys()
        if moment == "upload":
            return len(names - before) >= objects
        if moment == "export":
            return any(name.startswith("model/") for name in names - before)
        gone = seen - names
        seen.update(names)
        return any(name.endswith(f"/{COMMIT_FILE}") for name in gone)

    delay = chance.uniform(0, MOST_SECONDS)
    return crash.wait_for(launch, happened) and crash.pause(delay)


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

    def __init__(self, inputs: Path, kills: int, seed: int) -> None:
        self.inputs = inputs
        self.wanted = kills
        self.chance = random.Random(seed)
        self.kills = 0
        self.counts = Counter[str]()

    def finish_run(self, run: Path, method: str, store: ObjectStore) -> list[str]:
        """Kill and resume until it is done; returns what is wrong."""
        newest = 0
        while True:
            shutil.rmtree(run, ignore_errors=True)
            launch = crash.Launch(self.inputs, run, method, ["--save_to", store.url])
            [moment] = self.chance.choices(list(MOMENTS), list(MOMENTS.values()))
            is_wanted = self.kills < self.wanted
            if not is_wanted or not reaches(launch, moment, store, self.chance):
                if launch.process.wait():
                    return [f"a launch failed that was not killed:\n{launch.tail()}"]
                return []
            launch.kill_all(self.chance)
            if launch.process.returncode == 0:  # it had just ended by itself
                return []
            self.kills += 1
            self.counts[moment] += 1
            held = max(read_commits(store), default=0)
            print(
                f"kill {self.kills} of {self.wanted}: {method}, {moment}; step {held}", flush=True
            )
            problems = corrupted(store, self.inputs)
            if held < newest:
                problems.append(f"step {newest} was in the store, and now {held} is the newest")
            if problems:
                return problems
            newest = held


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
    parser.add_argument("--methods", default=",".join(crash.METHODS))
    parser.add_argument("--folder", help="for the runs; a temporary one by default")
    asked = parser.parse_args()
    methods = asked.methods.split(",")
    server = start_server()
    inputs = Path(tempfile.mkdtemp(prefix="store-crash-", dir=asked.folder))
    crash.write_inputs(inputs)
    references: dict[str, Path] = {}
    crashes = StoreCrashes(inputs, asked.kills, asked.seed)
    runs = 0
    while crashes.kills < crashes.wanted:
        method = methods[runs % len(methods)]
        if method not in references:
            references[method], _ = crash.reference_run(inputs, method)
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
    server.stop()
    shutil.rmtree(inputs)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(crashes.counts.items()))
    print(
        f"{crashes.kills} kills in {runs} runs ({counts}): the newest checkpoint in the bucket always "
        "verified, and every run is identical to the uninterrupted one."
    )


if __name__ == "__main__":
    main()
