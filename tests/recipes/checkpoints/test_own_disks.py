"""--save_to with nodes that do not share --output_dir: each has its own directory, and the store joins
them."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agents import SLOWED, nodes, wait_until
from conftest import RECIPE, load_script
from forked import forked, start_forked

from llama_ft.extensions.store.object_store import (
    ObjectStore,
    commit_name,
    is_uploaded,
    read_commits,
)

storage = load_script(Path(__file__).with_name("test_object_storage.py"))
elastic = load_script(Path(__file__).with_name("test_elastic_run.py"))
# fixtures
server = storage.server
crash = storage.crash
inputs = storage.inputs
whole_elastic = elastic.whole

download = storage.download
flags = storage.flags
two_nodes = partial(forked, RECIPE, ranks=2, nodes=2)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def kill_before_step_6(happened: Callable[[], Any], words: list[str], log: Path) -> None:
    """Start the recipe on two nodes, and kill both after a moment, but not before step 6 begins."""
    running = start_forked(SLOWED, *words, output=log, ranks=2, nodes=2, HOLD_AT="6")
    while running.is_alive() and not happened():
        time.sleep(0.01)
    running.send(signal.SIGKILL)
    running.wait(30)


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("nothing", marks=pytest.mark.slow),
        pytest.param("first disk", marks=pytest.mark.large),
        pytest.param("second disk", marks=pytest.mark.slow),
        pytest.param("uploads", marks=pytest.mark.large),
    ],
)
def test_nodes_with_their_own_disks_resume_from_the_store(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path, lost: str
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    disks = [tmp_path / "node0", tmp_path / "node1"]
    words = flags(crash, inputs, tmp_path / "node{node}" / "run", "--save_to", url)
    kill_before_step_6(lambda: max(read_commits(store), default=0) >= 4, words, tmp_path / "log")
    assert not (disks[1] / "run" / "metrics.jsonl").exists()
    if lost == "nothing":  # but the nodes have changed places, so rank 0 has an old log
        disks[0].rename(tmp_path / "other")
        disks[1].rename(disks[0])
        (tmp_path / "other").rename(disks[1])
    elif lost == "uploads":  # the store was down until the kill
        for step in read_commits(store):
            store.delete(commit_name(step))
    else:
        shutil.rmtree(disks[0] if lost == "first disk" else disks[1])
    held = max(read_commits(store), default=0)
    finished = two_nodes(*words)
    assert finished.exit_code == 0, finished.output
    assert "The nodes have 2 disks for --output_dir" in finished.output
    assert held == 0 or f"after step {held}" in finished.output
    assert (
        crash.differences(download(url, tmp_path / "copy"), inputs / "whole", all_checkpoints=False)
        == []
    )
    assert is_uploaded(store, 8)
    for disk in disks:
        assert json.loads((disk / "run" / "status.json").read_text())["state"] == "finished"
    first, second = (names(disk / "run" / "checkpoints") for disk in disks)
    whole = names(inputs / "whole" / "checkpoints")
    if lost == "uploads":
        assert {name for name in first if name.startswith("set-aside")} == first - whole != set()
    else:
        assert first == second == whole
    newest = [disk / "run" / "checkpoints" / "step-000008" for disk in disks]
    shards = [{file.name for file in folder.glob("shard-*")} for folder in newest]
    assert len(shards[0]) == len(shards[1]) == 1 and shards[0] != shards[1]
    again = two_nodes(*words)
    assert again.exit_code == 0 and "This run was finished" in again.output, again.output


@pytest.mark.slow
def test_early_stopping_takes_the_best_weights_from_the_store(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    stops = ["--early_stopping_patience", "1", "--early_stopping_min_delta", "9", "--eval_steps", "3"]  # fmt: skip
    whole = forked(RECIPE, *flags(crash, inputs, tmp_path / "whole", *stops, epochs=3), ranks=2)
    assert whole.exit_code == 0, whole.output
    directory = tmp_path / "node{node}" / "run"
    run = two_nodes(*flags(crash, inputs, directory, "--save_to", url, *stops, epochs=3))
    assert run.exit_code == 0, run.output
    assert json.loads((tmp_path / "whole/checkpoints/best.json").read_text())["step"] == 3
    # Of the best checkpoint the disk of rank 0 has also the other node's shard, of others it does not.
    assert crash.differences(tmp_path / "node0" / "run", tmp_path / "whole") == [
        f"checkpoints/step-00000{step}/shard-00002-model-00001-of-00001.safetensors: only one of the runs has it"
        for step in (4, 6)
    ]


@pytest.mark.large
def test_agents_with_their_own_directories_resume_each_others_run(
    server: str, whole_elastic: Path, tmp_path: Path, tiny_model: Path, rows70: Path
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    words = elastic.words_of(tiny_model, rows70, "run", "--save_to", url)  # in each node's own
    with nodes(2, tmp_path, words, is_command=True) as started:
        first = started.start("first")
        second = started.start("second")
        wait_until(lambda: any(step >= 5 for step in read_commits(store)), first, second)
        started.lose(first)
        held = max(read_commits(store))
        wait_until(lambda: any(step > held for step in read_commits(store)), second)
        started.take_per_step(1.0)
        first = started.start("first")
        wait_until(lambda: started.output.count("= ranks (2) x micro-batch") >= 2, first, second)
        started.take_per_step(0.0)
        exit_codes = [node.wait() for node in (first, second)]
        output = started.output
    assert exit_codes == [0, 0], output
    assert output.count("Fetching step-") >= 2
    elastic.assert_equal_run(download(url, tmp_path / "copy"), whole_elastic)
    assert json.loads(store.get_text("status.json"))["state"] == "finished"
