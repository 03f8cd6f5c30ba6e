"""The disk is full when a checkpoint is to be written: the run ends with a message, and what was there before is kept.

The disk is a small tmpfs in a mount namespace. Where none can be made, /dev/full stands for a full disk.
"""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, Finished, metrics, run

from llama_ft.checkpoint import checkpoint_errors, complete_checkpoints
from llama_ft.checkpoint.writer import SPACE_FOR_THE_REST

DISK_BYTES = 160 * 2**20
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@dataclass(frozen=True)
class Disk:
    """A file system for a run."""

    folder: Path  # where the run finds it
    seen: Path  # the same folder for this process
    enter: list[str]  # what a command begins with to see it; empty where there is no namespace

    def leave_free(self, nbytes: int) -> None:
        """Have something else take all but so much of it."""
        stats = os.statvfs(self.seen)
        wanted = stats.f_bavail * stats.f_frsize - nbytes
        with open(self.seen / "something-else", "ab") as file:
            for start in range(0, wanted, 2**20):  # of one that is too large nothing would stay
                try:
                    os.posix_fallocate(file.fileno(), file.tell() + start, min(2**20, wanted - start))
                except OSError as error:
                    assert error.errno == errno.ENOSPC  # the run is taking it, too
                    return


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={DISK_BYTES} none {folder} && echo ready && cat"
    for unshare, enter in ((["unshare", "-rm"], ["-U", "--preserve-credentials", "-m"]), (["unshare", "-m"], ["-m"])):
        try:
            streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            holder = subprocess.Popen([*unshare, "sh", "-c", mount], **streams)
        except FileNotFoundError:
            break
        with holder:
            assert holder.stdin is not None and holder.stdout is not None
            if holder.stdout.readline() == b"ready\n":
                pid = str(holder.pid)
                yield Disk(folder, Path(f"/proc/{pid}/root{folder}"), ["nsenter", "-t", pid, *enter])
                return
    yield Disk(folder, folder, [])


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for a checkpoint not to be written at once."""
    return save_model(tmp_path_factory.mktemp("model") / "large", hidden_size=256, intermediate_size=2048)


@pytest.fixture(scope="module")
def checkpoint_bytes(model: Path) -> int:
    """Of fp32 weights and AdamW's two states."""
    from safetensors import safe_open

    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())
    return 3 * total


def train(disk: Disk, model: Path, rows: Path, launcher: list[str], *flags: str) -> Finished:
    """3 steps with a checkpoint after each."""
    command = [*disk.enter, *launcher, str(RECIPE), "--model_name", str(model), "--dataset", str(rows), *flags]
    command += ["--enable_fsdp", "--precision", "fp32", "--max_train_step", "3", "--save_steps", "1"]
    command += ["--batch_size_training", "1", "--keep_last", "1"]
    return run([*command, "--output_dir", str(disk.folder / "run")], timeout=120)


def train_while_the_disk_fills_up(disk: Disk, model: Path, rows: Path, launcher: list[str]) -> Finished:
    """Once the second checkpoint is begun, something else takes the room that was found free for it."""
    checkpoints, ended = disk.seen / "run" / "checkpoints", threading.Event()

    def fill() -> None:
        wanted = checkpoints / ".writing-step-000002" if disk.enter else disk.seen / "run" / "metrics.jsonl"
        while not wanted.exists():
            if ended.wait(0.001):
                return
        if disk.enter:
            disk.leave_free(2**20)  # for status.json and the report: nothing of the checkpoint may be written yet
        else:
            aside = checkpoints / ".writing-step-000002"
            aside.mkdir(parents=True)
            (aside / "shard-00001-model-00001-of-00001.safetensors").symlink_to("/dev/full")

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        return train(disk, model, rows, launcher)
    finally:
        ended.set()
        filler.join()


def check_what_is_left(disk: Disk, finished: Finished) -> None:
    """Check the message, exit code 1, and that only the earlier checkpoint is there and valid."""
    assert finished.exit_code == 1, finished.output
    assert "step-000002: the checkpoint could not be written" in finished.output
    assert f"Last complete checkpoint: {disk.folder}/run/checkpoints/step-000001" in finished.output
    folder = disk.seen / "run"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000001"}
    assert checkpoint_errors(folder / "checkpoints" / "step-000001") == []
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed" and "step-000002: the checkpoint could not be" in status["message"]


def test_too_little_room_ends_the_run_with_the_size_that_is_needed(
    disk: Disk, model: Path, rows16: Path, checkpoint_bytes: int
) -> None:
    if disk.enter:
        disk.leave_free(checkpoint_bytes * 3 // 2)
        finished = train(disk, model, rows16, [sys.executable])
        mebibytes = (checkpoint_bytes + SPACE_FOR_THE_REST) / 2**20  # random numbers and step counters are a few KiB
        assert f"it needs {mebibytes:.1f} MiB, but " in finished.output
    else:
        finished = train_while_the_disk_fills_up(disk, model, rows16, [sys.executable])
        assert "rank 0: No space left on device" in finished.output
    check_what_is_left(disk, finished)


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_ends_the_run_and_with_room_it_goes_on(
    disk: Disk, model: Path, rows16: Path, checkpoint_bytes: int
) -> None:
    if disk.enter:
        disk.leave_free(2 * checkpoint_bytes + SPACE_FOR_THE_REST + 2**21)
    finished = train_while_the_disk_fills_up(disk, model, rows16, TORCHRUN)
    check_what_is_left(disk, finished)
    assert "No space left on device" in finished.output
    if disk.enter:
        (disk.seen / "something-else").unlink()
    resumed = train(disk, model, rows16, [sys.executable], "--resume", "auto")
    assert resumed.exit_code == 0, resumed.output
    assert "step-000001, after step 1" in resumed.output
    assert [line["step"] for line in metrics(disk.seen / "run")] == [1, 2, 3]
    [newest] = complete_checkpoints(disk.seen / "run")
    assert newest.name == "step-000003" and checkpoint_errors(newest) == []
