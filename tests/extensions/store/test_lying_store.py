"""An S3 server that gives wrong answers: no answer makes a run start from step 1 while there are
checkpoints, and none of them is deleted."""

import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import REPOSITORY, load_script
from stores import AWS, environment

from llama_ft.checkpoint import CheckpointWriter
from llama_ft.checkpoint.resume import find_checkpoint
from llama_ft.config import CheckpointConfig
from llama_ft.errors import UserError
from llama_ft.extensions.store.object_store import (
    COMMIT_FILE,
    ObjectStore,
    commit_name,
    read_commits,
    stored_file,
)
from llama_ft.extensions.store.owner import take_over
from llama_ft.extensions.store.remote import RunInStore
from llama_ft.extensions.store.uploads import Uploads
from llama_ft.runtime import Ranks, log

STATE = {"progress": {"best": {"step": 0}}}


@pytest.fixture(scope="module")
def lying() -> Iterator[Any]:
    """The module benchmarks/checkpoints/lying_store.py."""
    with environment({**AWS, "AWS_MAX_ATTEMPTS": "1"}):
        yield load_script(REPOSITORY / "benchmarks" / "checkpoints" / "lying_store.py")


@pytest.fixture(scope="module")
def server(lying: Any) -> Any:
    return lying.LyingServer()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many attempts as in a run, and no time between them."""
    monkeypatch.setattr("llama_ft.extensions.store.object_store.RETRY_SECONDS", (0.01,) * 6)
    monkeypatch.setattr("llama_ft.extensions.store.object_store.ACCESS_RETRY_SECONDS", (0.01,) * 4)
    # s3fs waits 0.1 s or longer before it repeats a request after a status of 500
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


def slow(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.slow)


class Saved(NamedTuple):
    """A run in a bucket, with checkpoints of step 3 and 5."""

    url: str
    run: Path  # its own directory
    ranks: Ranks
    server: Any
    store: ObjectStore  # a new client takes as long as the requests of a start

    def settings(self, directory: str) -> CheckpointConfig:
        output_dir = str(self.run.with_name(directory))
        return CheckpointConfig(save_to=self.url, output_dir=output_dir, resume="auto", keep_last=0)

    def successor(self) -> int | None:
        """Start the run on an empty disk as the recipe does, save once, and end it. Return the step
        from which it resumed; None if it ended with an error of the user."""
        settings = self.settings("successor")
        run = Path(str(settings.output_dir))
        shutil.rmtree(run, ignore_errors=True)
        try:
            remote = RunInStore(settings, self.ranks)
            resumed = find_checkpoint(settings, self.ranks, remote)
            run.mkdir(exist_ok=True)
            remote.open(run, resumed)
            uploads = remote.uploads
            assert uploads is not None
            resumed = remote.take_newer(
                resumed, lambda: find_checkpoint(settings, self.ranks, remote)
            )
            step = resumed.step if resumed else 0
            save(run, uploads, self.ranks, step + 1)
            uploads.put_model()
            return step
        except UserError:
            return None
        finally:
            self.ranks.release_lock()

    def lost(self) -> list[str]:
        """The files of the two checkpoints that are gone or differ."""
        store = self.store
        commits = read_commits(store)
        file = self.run.with_name("object")
        lost = []
        for step in (3, 5):
            if step not in commits:
                lost.append(commit_name(step))
                continue
            for name, expected in commits[step].files.items():
                store.get_file(commit_name(step).replace(COMMIT_FILE, name), file)
                if stored_file(file) != expected:
                    lost.append(f"{step}/{name}")
        return lost


def save(run: Path, uploads: Uploads, ranks: Ranks, *steps: int) -> None:
    """Write checkpoints, and upload them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)))
    writer = CheckpointWriter(run, CheckpointConfig(keep_last=0), {}, ranks, uploads.hooks())
    uploads.add_missing()
    for step in steps:
        writer.save(step, model, optimizer, STATE)
        writer.finish()
        writer.finish_uploads()


@pytest.fixture
def saved(server: Any, tmp_path: Path, runtime: Ranks) -> Iterator[Saved]:
    server.tell(None)
    run = tmp_path / "run"
    run.mkdir()
    (run / ".llama_ft-run").touch()
    url = f"s3://runs/{tmp_path.name}"
    store = ObjectStore(url, "")
    uploads = Uploads(store, run, 0, 0, runtime)
    save(run, uploads, runtime, 3, 5)
    yield Saved(url, run, runtime, server, store)
    server.tell(None)


@pytest.mark.parametrize(
    ("kind", "request_kind", "times"),
    [("empty", "LIST", 4), pytest.param("html", "GET", 3, marks=pytest.mark.slow)],
)
def test_a_wrong_answer_neither_restarts_a_run_nor_deletes_a_checkpoint(
    saved: Saved, lying: Any, kind: str, request_kind: str, times: int
) -> None:
    saved.server.tell(lying.Lie(kind, request_kind, times))
    resumed_at = saved.successor()
    assert saved.server.lies == times
    saved.server.tell(None)
    assert resumed_at in (None, 3, 5)
    assert saved.lost() == []


@pytest.mark.large
def test_no_kind_of_wrong_answer_restarts_a_run_or_deletes_a_checkpoint(
    saved: Saved, lying: Any
) -> None:
    lies = []
    times = itertools.cycle((4, 1, 3, 2))
    names = itertools.cycle(("", COMMIT_FILE, "owner.json|shard"))
    for kind, requests in lying.KINDS.items():
        for request_kind in requests:
            if request_kind == "LIST":
                lies.append(lying.Lie(kind, request_kind, next(times)))
            else:
                pair = (next(names), next(names))
                lies += [lying.Lie(kind, request_kind, next(times), name) for name in pair]
    wrong = []
    endings = set()
    for lie in lies:
        saved.server.tell(lie)
        resumed_at = saved.successor()
        saved.server.tell(None)
        lost = saved.lost()
        endings.add(resumed_at)
        if resumed_at == 0 or lost:
            wrong.append((lie, resumed_at, lost))
        # as before: only the two checkpoints
        for name in saved.store.sizes("checkpoints"):
            if not name.startswith(("checkpoints/step-000003", "checkpoints/step-000005")):
                saved.store.delete(name)
    assert wrong == []
    assert len(lies) >= 50 and 5 in endings


@pytest.mark.slow
def test_a_listing_that_stays_wrong_is_an_error_and_not_an_empty_store(
    saved: Saved, lying: Any
) -> None:
    saved.server.tell(lying.Lie("empty", "LIST", 10**6))
    settings = saved.settings("successor")
    with pytest.raises(UserError, match="a listing lacks an object that was written just before"):
        find_checkpoint(settings, saved.ranks, RunInStore(settings, saved.ranks))


@pytest.mark.slow
def test_commits_that_stay_unreadable_are_an_error_and_not_an_empty_store(
    saved: Saved, lying: Any
) -> None:
    saved.server.tell(lying.Lie("html", "GET", 10**6, COMMIT_FILE))
    settings = saved.settings("successor")
    with pytest.raises(UserError) as caught:
        find_checkpoint(settings, saved.ranks, RunInStore(settings, saved.ranks))
    assert "holds checkpoints, but none of their commit objects can be used" in str(caught.value)
    assert "step-000005/commit.json is corrupted" in str(caught.value)


@pytest.mark.parametrize("kind", ["403", *map(slow, ("500", "404", "html", "truncated", "empty"))])
def test_of_a_checkpoint_with_one_unreadable_object_the_one_before_is_taken(
    saved: Saved, lying: Any, kind: str
) -> None:
    saved.server.tell(lying.Lie(kind, "GET", 10**6, "step-000005/shard"))
    assert saved.successor() == 3
    saved.server.tell(None)
    assert saved.lost() == []
    assert saved.successor() == 5


@pytest.mark.slow
def test_checkpoints_that_cannot_be_read_at_all_are_an_error(saved: Saved, lying: Any) -> None:
    saved.server.tell(lying.Lie("403", "GET", 10**6, "shard"))
    settings = saved.settings("successor")
    with pytest.raises(UserError, match="shard-00001.* cannot be read"):
        find_checkpoint(settings, saved.ranks, RunInStore(settings, saved.ranks))
    saved.ranks.release_lock()


@pytest.mark.parametrize("kind", ["404", *map(slow, ("html", "403", "500", "empty", "truncated"))])
def test_an_owner_that_cannot_be_read_never_ends_training(
    saved: Saved, lying: Any, kind: str
) -> None:
    saved.server.tell(lying.Lie(kind, "GET", 10**6, "owner.json"))
    uploads = Uploads(saved.store, saved.run, 0, 5, saved.ranks)
    save(saved.run, uploads, saved.ranks, 7)
    assert uploads.error is None
    saved.server.tell(lying.Lie(kind, "GET", 3, "owner.json"))
    save(saved.run, uploads, saved.ranks, 8)
    assert uploads.error is None and 8 in read_commits(saved.store)
    take_over(saved.store)
    saved.server.tell(lying.Lie(kind, "GET", 3, "owner.json"))
    with pytest.raises(UserError, match="another run has taken over"):
        save(saved.run, uploads, saved.ranks, 9)


@pytest.mark.slow
def test_older_checkpoints_stay_until_the_new_commit_can_be_read(saved: Saved, lying: Any) -> None:
    uploads = Uploads(saved.store, saved.run, 1, 5, saved.ranks)
    saved.server.tell(lying.Lie("empty", "PUT", 10**6, "step-000007/commit.json"))
    save(saved.run, uploads, saved.ranks, 7)
    saved.server.tell(None)
    assert [*read_commits(saved.store)] == [5, 3]
    assert saved.lost() == []
    save(saved.run, uploads, saved.ranks, 8)
    assert [*read_commits(saved.store)] == [8]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stale", "truncated", "html", "404"])
def test_files_are_not_deleted_because_a_listing_lacks_their_commit(
    saved: Saved, lying: Any, kind: str
) -> None:
    """A commit that this run does not know: the earlier run has written it last."""
    uploads = Uploads(saved.store, saved.run, 0, 0, saved.ranks)
    saved.server.tell(lying.Lie(kind, "LIST", 10**6))
    uploads._prune(9)
    saved.server.tell(None)
    assert saved.lost() == []


@pytest.mark.slow
def test_a_store_with_an_owner_and_no_checkpoint_is_reported(
    server: Any, tmp_path: Path, runtime: Ranks
) -> None:
    server.tell(None)
    url = f"s3://runs/{tmp_path.name}"
    settings = CheckpointConfig(save_to=url, output_dir=str(tmp_path / "run"), resume="auto")
    remote = RunInStore(settings, runtime)
    assert find_checkpoint(settings, runtime, remote) is None
    assert remote.store is not None
    take_over(remote.store)
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        assert find_checkpoint(settings, runtime, remote) is None
    finally:
        log.removeHandler(handler)
    [line] = [line for line in lines if "owner.json" in line]
    assert line.startswith(f"{url}: an earlier run has written owner.json, but no checkpoint.")
