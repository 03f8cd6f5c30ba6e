"""Files that the checkpoints of a run share, and a store of real files."""

import os
import threading
from pathlib import Path

import pytest

from llama_ft.extensions.store import object_store
from llama_ft.extensions.store.object_store import ObjectStore
from llama_ft.extensions.store.shared_files import SharedFiles, put_in_place


class Watched:
    """The shared files of a run, and what was read and requested.

    Attributes:
        read: files whose checksums were computed.
        requests: to the store, with the names of their objects.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = folder / "run/rollouts"
        self.store = ObjectStore(f"file://{folder}/store", "--save_to")
        self.files = SharedFiles(self.store, folder / "run", threading.Event())
        self.read = list[str]()
        self.requests = list[str]()
        digest = object_store.file_digest
        request = self.store._request

        def digest_and_record(file: Path) -> str:
            self.read.append(str(file.relative_to(self.rounds)))
            return digest(file)

        def request_and_record(method: str, *words: str, **more: object) -> object:
            self.requests.append(f"{method} {words[-1].partition('/store/')[2]}")
            return request(method, *words, **more)

        monkeypatch.setattr(object_store, "file_digest", digest_and_record)
        monkeypatch.setattr(self.store, "_request", request_and_record)

    def write_round(self, number: int) -> None:
        folder = self.rounds / f"{number:06}"
        folder.mkdir(parents=True)
        for name in ("old", "round.json"):
            (folder / name).write_text(str(number))

    def save(self) -> list[str]:
        """What a checkpoint does. Return the names that its commit object lists."""
        self.read.clear()
        self.requests.clear()
        files = self.files.put()
        self.files.check_sizes(files)
        return list(files)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Three rounds, and a checkpoint."""
    one = Watched(tmp_path, monkeypatch)
    for number in (1, 2, 3):
        one.write_round(number)
    one.save()
    return one


def test_files_that_have_not_changed_are_neither_read_nor_listed_again(watched: Watched) -> None:
    assert len(watched.read) == 6
    watched.write_round(4)
    names = watched.save()
    new = ["000004/old", "000004/round.json"]
    assert watched.read == new
    puts = [f"put_file rollouts/{name}" for name in new]
    assert watched.requests == [*puts, "find rollouts/000004"]
    assert len(names) == 8
    assert watched.save() == names
    assert watched.read == watched.requests == []


def test_a_file_that_was_replaced_by_one_of_its_size_and_time_is_uploaded(
    watched: Watched, tmp_path: Path
) -> None:
    file = watched.rounds / "000002/old"
    times = file.stat()
    aside = watched.rounds / ".old.tmp"
    aside.write_text("5")
    os.utime(aside, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(aside, file)
    watched.save()
    assert watched.read == ["000002/old"]
    assert watched.requests == ["put_file rollouts/000002/old", "find rollouts/000002"]
    assert (tmp_path / "store/rollouts/000002/old").read_text() == "5"


def test_a_file_that_the_store_lacks_after_its_upload_is_an_error(
    watched: Watched, tmp_path: Path
) -> None:
    watched.write_round(4)
    files = watched.files.put()
    (tmp_path / "store/rollouts/000004/old").write_text("")
    with pytest.raises(RuntimeError, match="rollouts/000004/old is incomplete in the store"):
        watched.files.check_sizes(files)


def test_fetched_files_are_moved_next_to_those_that_are_there(tmp_path: Path) -> None:
    names = ["rollouts/000001/old", "rollouts/000002/old", "rollouts/000002/round.json"]
    for name in names:
        (tmp_path / "aside" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "aside" / name).write_text(name)
    here = tmp_path / "run/rollouts/000001/round.json"
    here.parent.mkdir(parents=True)
    here.write_text("here")
    put_in_place(tmp_path / "aside", names, tmp_path / "run")
    found = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    texts = {str(path.relative_to(tmp_path / "run")): path.read_text() for path in found}
    assert texts == {**{name: name for name in names}, "rollouts/000001/round.json": "here"}
