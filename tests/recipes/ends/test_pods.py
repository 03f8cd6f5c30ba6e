"""The command of launch/kubernetes/finetune.yaml as Kubeflow Trainer starts it: a process per pod
with torchrun's variables, each on a disk of its own that is lost with the pod, and an S3 server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from conftest import REPOSITORY, load_script
from forked import ENVIRONMENT
from stores import download, s3_server

from llama_ft.extensions.store.object_store import ObjectStore, read_commits

_, TRAIN_JOB = yaml.safe_load_all(
    (REPOSITORY / "launch" / "kubernetes" / "finetune.yaml").read_text()
)
PODS = 2
STEPS = 7  # per epoch
EPOCHS = 10  # enough for a run that has not ended when its first checkpoint is in the bucket
SECONDS = 240
SAVE_AND_STOP = 143  # exit codes of launch/run.sh
START_AGAIN = 138


@pytest.fixture(scope="module")
def crash() -> ModuleType:
    return load_script(REPOSITORY / "benchmarks" / "checkpoints" / "crash.py")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def inputs(server: str, crash: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data, and `whole`: the run of two pods that nobody stops."""
    folder = tmp_path_factory.mktemp("pods")
    crash.write_inputs(folder)
    job = Job(crash, folder, folder / "disks", "s3://runs/whole")
    job.start()
    assert job.wait() == [0, 0], job.logs()
    return download("s3://runs/whole", folder / "whole").parent


class Job:
    """Two pods. `start` creates them on empty disks."""

    def __init__(self, crash: ModuleType, inputs: Path, disks: Path, url: str) -> None:
        arguments = TRAIN_JOB["spec"]["trainer"]["args"]
        script = arguments.index("recipes/finetuning.py")
        self.command = [*arguments[: script + 1], *crash.FLAGS]
        self.command[self.command.index("--num_epochs") + 1] = str(EPOCHS)
        self.command += ["--model_name", f"{inputs}/model", "--dataset", f"{inputs}/rows.jsonl"]
        self.command += ["--output_dir", "output/finetune", "--save_to", url, "--no_plan"]
        self.crash = crash
        self.mark = f"POD_OF={uuid.uuid4().hex}"
        self.disks = disks
        self.pods: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        shutil.rmtree(self.disks, ignore_errors=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pods = [self._start(rank, port) for rank in range(PODS)]

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        disk = self.disks / str(rank)
        disk.mkdir(parents=True)
        for name in ("launch", "recipes"):
            (disk / name).symlink_to(REPOSITORY / name)
        variables = {**os.environ, **ENVIRONMENT}
        variables |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # those of pkg/runtime/framework/plugins/torch in Kubeflow Trainer
            "PET_NNODES": str(PODS),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240",
            "LLAMA_FT_CACHE": str(disk / "cache"),
        }
        name, _, value = self.mark_of(rank).partition("=")
        variables[name] = value
        with open(self.disks / f"{rank}.log", "wb") as log:
            return subprocess.Popen(
                self.command,
                cwd=disk,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def mark_of(self, rank: int) -> str:
        """What the environment of a pod's processes has."""
        return f"{self.mark}-{rank}"

    def lose(self, rank: int) -> None:
        """Kill all processes of a pod, as the loss of its node does."""
        while alive := self.crash.marked_processes(self.mark_of(rank)):
            for process in alive:
                self.crash.kill(process)
            if self.pods[rank].poll() is None:
                time.sleep(0.05)

    def wait(self) -> list[int]:
        """Return the exit codes of the pods."""
        try:
            return [pod.wait(SECONDS) for pod in self.pods]
        finally:
            for rank in range(PODS):
                self.lose(rank)

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.disks.glob("*.log")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "stopped"),
    [
        pytest.param("suspended", [0, 1], marks=pytest.mark.large),
        pytest.param("preempted", [1], marks=pytest.mark.large),
        pytest.param("preempted", [0], marks=pytest.mark.large),
    ],
)
def test_a_job_that_is_stopped_saves_uploads_and_continues_on_empty_disks(
    crash: ModuleType, inputs: Path, tmp_path: Path, event: str, stopped: list[int]
) -> None:
    """Suspend, activeDeadlineSeconds and `kubectl delete` send SIGTERM to all pods; preemption,
    eviction and `kubectl drain` to one."""
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    job = Job(crash, inputs, tmp_path / "disks", url)
    job.start()
    wait_for_checkpoint(store, job)
    for rank in stopped:
        job.pods[rank].send_signal(signal.SIGTERM)
    codes = job.wait()
    logs = job.logs()
    assert {codes[rank] for rank in stopped} == {SAVE_AND_STOP}, logs
    assert set(codes) <= {SAVE_AND_STOP, START_AGAIN}, logs
    newest = max(read_commits(store))
    assert f"stopped by SIGTERM after step {newest}." in logs, event
    assert f"Uploaded step-{newest:06d} to {url}" in logs

    job.start()
    assert job.wait() == [0, 0], job.logs()
    assert f"Fetching step-{newest:06d} from {url}" in job.logs()
    copy = download(url, tmp_path / "copy")
    found = crash.differences(copy, inputs / "whole", all_checkpoints=False)
    # An evaluation that the signal abandoned is not repeated, and so its step cannot be the best.
    abandoned = f"metrics.jsonl: step {newest}: eval/"
    others = [difference for difference in found if not difference.startswith(abandoned)]
    assert others == [] or (others == ["checkpoints/best.json differs"] and others != found)
    if found:
        assert "The evaluation was abandoned." in logs


@pytest.mark.slow
def test_a_job_that_loses_a_pod_continues_from_the_bucket(
    crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    job = Job(crash, inputs, tmp_path / "disks", url)
    job.start()
    wait_for_checkpoint(store, job)
    job.lose(1)
    codes = job.wait()
    assert codes[0] in (1, START_AGAIN), job.logs()

    held = max(read_commits(store))
    job.start()
    assert job.wait() == [0, 0], job.logs()
    assert f"Fetching step-{held:06d} from {url}" in job.logs()
    copy = download(url, tmp_path / "copy")
    assert crash.differences(copy, inputs / "whole", all_checkpoints=False) == []


def wait_for_checkpoint(store: ObjectStore, job: Job) -> None:
    deadline = time.monotonic() + SECONDS
    while not read_commits(store):
        assert time.monotonic() < deadline, job.logs()
        assert all(pod.poll() is None for pod in job.pods), job.logs()
        time.sleep(0.05)
