"""The cache folder, and folders that appear whole or not at all."""

from pathlib import Path

import pytest

from llama_ft.data import cache_dir
from llama_ft.data.cache import build_once
from llama_ft.errors import RunFailure


def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LLAMA_FT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LLAMA_FT_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "llama_ft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "llama_ft"


def test_finished_folder_is_not_built_again(tmp_path: Path) -> None:
    for text in ("first", "second"):
        build_once(tmp_path / "a", lambda folder, text=text: (folder / "done").write_text(text))
    assert (tmp_path / "a" / "done").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folder_of_a_faster_process_is_taken(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "done").write_text("ours")
        if not (tmp_path / "a").exists():
            build_once(tmp_path / "a", lambda other: (other / "done").write_text("theirs"))

    assert (build_once(tmp_path / "a", build) / "done").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("left", ["", "content of a"])
def test_folder_that_lacks_a_file_is_built_again(tmp_path: Path, left: str) -> None:
    def build(folder: Path) -> None:
        (folder / "inner").mkdir()
        for path in ("a.txt", "inner/b.txt"):
            (folder / path).write_text("content of " + path)

    target = build_once(tmp_path / "a", build)
    (target / "another").write_text("")
    assert build_once(target, build) == target and (target / "another").exists(), (
        "complete, so not built again"
    )
    (target / "inner/b.txt").unlink()
    (target / "a.txt").write_text(left)
    build_once(target, build)
    assert (target / "inner/b.txt").read_text() == "content of inner/b.txt" and not (
        target / "another"
    ).exists()
    assert (target / "a.txt").read_text() == "content of a.txt"


def test_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        Path("/dev/full").write_text("more")

    with pytest.raises(RunFailure, match="a: cannot be built: No space left .*\n.* LLAMA_FT_CACHE"):
        build_once(tmp_path / "a", build)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailure, match="file/a: cannot be built: Not a directory"):
        build_once(tmp_path / "file" / "a", lambda folder: None)
