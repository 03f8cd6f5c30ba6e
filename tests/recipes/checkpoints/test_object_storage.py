"""--save_to: a real S3 server on loopback, processes that are killed, and directories that are lost."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from agents import SLOWED
from conftest import RECIPE, REPOSITORY, load_script, run
from forked import forked, start_forked
from plain_losses import write_pairs
from stores import SECRET, CuttingProxy, boto3, download, kill_when, s3_server

from llama_ft.extensions.store.object_store import ObjectStore, is_uploaded, read_commits

LAST_STEP = 8  # of a run of one epoch


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with a bucket `runs`; processes that a test starts find it."""
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def crash() -> ModuleType:
    return load_script(REPOSITORY / "benchmarks" / "checkpoints" / "crash.py")


@pytest.fixture(scope="module")
def inputs(crash: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data, and the run `whole`, which nobody stops."""
    folder = tmp_path_factory.mktemp("store")
    crash.write_inputs(folder)
    finished = forked(RECIPE, *flags(crash, folder, folder / "whole"), ranks=2)
    assert finished.exit_code == 0, finished.output
    return folder


def flags(crash: ModuleType, inputs: Path, output: Path, *more: str, epochs: int = 1) -> list[str]:
    """The benchmark's run on 2 ranks, of epochs of 8 steps."""
    words = [*crash.FLAGS, "--model_name", f"{inputs}/model", "--dataset", f"{inputs}/rows.jsonl"]
    words[words.index("--num_epochs") + 1] = str(epochs)
    return [*words, "--no_plan", "--output_dir", str(output), *more]


def differences(crash: ModuleType, url: str, inputs: Path, folder: Path) -> list[str]:
    """What a finished run has uploaded otherwise than `whole` has it on disk."""
    found: list[str] = crash.differences(
        download(url, folder / "copy"), inputs / "whole", all_checkpoints=False
    )
    return found


def has_no_secret(folder: Path) -> bool:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return not any(SECRET.encode() in file.read_bytes() for file in files)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            "checkpoints/step-000004/shard-00001-model-00001-of-00001.safetensors",
            marks=pytest.mark.slow,
        ),
        "checkpoints/step-000006/commit.json",
        pytest.param("model/config.json", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_during_an_upload_resumes_on_an_empty_disk(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path, moment: str
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    store.put_text("mine", "checkpoints/notes.txt")
    shard = "checkpoints/step-000004/shard-00002-model-00001-of-00001.safetensors"
    parts = [f"{tmp_path.name}/{name}" for name in (shard, "checkpoints/notes.bin")]
    s3 = boto3.client("s3")
    for key in parts:  # as a kill leaves them
        s3.create_multipart_upload(Bucket="runs", Key=key)
    run = tmp_path / "run"
    words = flags(crash, inputs, run, "--save_to", url)
    kill_when(lambda: moment in store.sizes(""), words, tmp_path / "log")
    held = read_commits(store)  # on a busy machine step 2 may be left out, and nothing be held
    was_complete = is_uploaded(store, LAST_STEP)
    shutil.rmtree(run)
    resumed = forked(RECIPE, *words, ranks=2)
    assert resumed.exit_code == 0, resumed.output
    if held:
        assert f"Fetching step-{max(held):06d} from {url}" in resumed.output
    # unless the run had already ended when it was killed
    assert was_complete or f"Uploaded: {url}" in resumed.output
    assert SECRET not in resumed.output
    assert differences(crash, url, inputs, tmp_path) == []
    assert store.get_text("checkpoints/notes.txt") == "mine"
    left = s3.list_multipart_uploads(Bucket="runs", Prefix=tmp_path.name)["Uploads"]
    assert [upload["Key"] for upload in left] == parts[1:]
    assert json.loads(store.get_text("status.json"))["state"] == "finished"
    assert is_uploaded(store, LAST_STEP) and has_no_secret(tmp_path)


@pytest.mark.slow
def test_a_final_upload_that_was_killed_is_finished_by_resume(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    run = tmp_path / "run"
    words = flags(crash, inputs, run, "--save_to", url)
    kill_when(lambda: "model/config.json" in store.sizes(""), words, tmp_path / "log")
    assert (run / "model").is_dir()
    # as if the kill had come a moment earlier
    for name in ("result.json", "model/config.json"):
        store.delete(name)
    assert not is_uploaded(store, LAST_STEP)
    finished = forked(RECIPE, *words, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert f"its final model is {run}/model" in finished.output
    assert is_uploaded(store, LAST_STEP)
    assert differences(crash, url, inputs, tmp_path) == []
    owner = store.get_text("owner.json")
    shutil.rmtree(run)
    again = forked(RECIPE, *words, ranks=2)
    assert again.exit_code == 0 and f"its final model is {url}/model" in again.output
    assert store.get_text("owner.json") == owner  # nothing is uploaded again


@pytest.mark.slow
def test_the_reference_of_dpo_is_fetched_with_its_checkpoint(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    """In full fine-tuning the reference is the model before step 1, and computed once."""
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 64)
    flags = [*crash.FLAGS, "--model_name", f"{inputs}/model", "--dataset", str(pairs), "--no_plan"]
    flags[flags.index("--num_epochs") + 1] = "2"
    flags += ["--objective", "dpo"]
    whole = tmp_path / "whole"
    finished = forked(RECIPE, *flags, "--output_dir", whole, ranks=2)
    assert finished.exit_code == 0, finished.output
    run = tmp_path / "run"
    words = [*flags, "--output_dir", str(run), "--save_to", url]
    kill_when(lambda: read_commits(store), words, tmp_path / "log")
    held = max(read_commits(store))
    was_complete = is_uploaded(store, crash.read_metrics(whole)[-1]["step"])
    shutil.rmtree(run)
    resumed = forked(RECIPE, *words, ranks=2)
    assert resumed.exit_code == 0, resumed.output
    fetched = run / "checkpoints" / f"step-{held:06d}" / "reference.safetensors"
    assert was_complete or f" examples from {fetched}\n" in resumed.output, resumed.output
    assert "computed again" not in resumed.output
    copy = download(url, tmp_path / "copy")
    assert crash.differences(copy, whole, all_checkpoints=False) == []
    expected = (whole / "reference.safetensors").read_bytes()
    files = [*run.rglob("reference.safetensors"), *copy.rglob("reference.safetensors")]
    assert files and {file.read_bytes() for file in files} == {expected}


def test_sigterm_uploads_the_last_checkpoint_and_says_so(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    words = flags(crash, inputs, tmp_path / "run", "--save_to", url, epochs=30)
    running = start_forked(RECIPE, *words, output=tmp_path / "log", ranks=2)
    while running.is_alive() and not read_commits(store):
        time.sleep(0.2)
    running.send(signal.SIGTERM)
    assert running.wait(60) == 143
    output = (tmp_path / "log").read_text()
    newest = max(read_commits(store))
    assert f"stopped by SIGTERM after step {newest}." in output
    assert f"Uploaded step-{newest:06d} to {url}" in output
    assert json.loads(store.get_text("status.json"))["state"] == "stopped"


def test_a_store_without_the_bucket_is_an_error_before_the_model_is_loaded(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    words = flags(crash, inputs, tmp_path / "run", "--save_to", "s3://no-such-bucket/run")
    finished = forked(RECIPE, *words, ranks=2)
    assert finished.exit_code == 2
    assert finished.output.count("error: --save_to s3://no-such-bucket/run: cannot be used") == 1
    assert "there is no such bucket" in finished.output and SECRET not in finished.output
    assert "Traceback" not in finished.output and not (tmp_path / "run").exists()


@pytest.mark.large
def test_a_store_that_stops_answering_does_not_stop_the_run(
    server: str, crash: ModuleType, inputs: Path, tmp_path: Path
) -> None:
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    proxy = CuttingProxy(int(server.rpartition(":")[2]))
    run = tmp_path / "run"
    words = flags(crash, inputs, run, "--save_to", url)
    variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "STORE_SECONDS": "5"}
    (tmp_path / "brake").write_text("0.1")
    variables["BRAKE"] = str(tmp_path / "brake")
    running = start_forked(SLOWED, *words, output=tmp_path / "log", ranks=2, **variables)
    while running.is_alive() and not read_commits(store):
        time.sleep(0.05)
    proxy.is_silent = True
    assert running.wait(400) == 0
    proxy.close()
    output = (tmp_path / "log").read_text()
    assert "no progress for 5 s" in output and "The run continues" in output
    assert f"Not uploaded to {url}: step-0000" in output and "model/ (" in output
    assert crash.differences(run, inputs / "whole") == []
    # the same command uploads the rest when the store answers again
    resumed = forked(RECIPE, *words, ranks=2)
    assert resumed.exit_code == 0, resumed.output
    assert is_uploaded(store, LAST_STEP) and differences(crash, url, inputs, tmp_path) == []


@pytest.mark.large
def test_runs_killed_at_random_moments_on_disks_that_are_lost_equal_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    script = str(REPOSITORY / "benchmarks" / "checkpoints" / "store_crash.py")
    finished = run([sys.executable, script, "--kills", "12", "--folder", str(tmp_path)], 900)
    assert finished.exit_code == 0, finished.output
    assert "12 kills in " in finished.output
    assert "every run is identical to the uninterrupted one" in finished.output
