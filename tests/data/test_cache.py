"""The cache folder, and folders that appear whole or not at all."""

import logging
from pathlib import Path

import pytest

from llama_ft.data import cache_dir
from llama_ft.data.cache import SIZES, build_once
from llama_ft.errors import RunFailure


def test_the_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LLAMA_FT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LLAMA_FT_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "llama_ft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "llama_ft"


def test_a_finished_directory_is_not_built_again(tmp_path: Path) -> None:
    for text in ("first", "second"):
        build_once(tmp_path / "a", lambda folder, text=text: (folder / "done").write_text(text))
    assert (tmp_path / "a" / "done").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_directory_of_a_faster_process_is_used(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "done").write_text("ours")
        if not (tmp_path / "a").exists():
            build_once(tmp_path / "a", lambda other: (other / "done").write_text("theirs"))

    assert (build_once(tmp_path / "a", build) / "done").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


JUNK = ["", "[]", "null", "{}", '{"a.txt": 3}', '{"a.txt": [0]}', "[" * 100_000, "\0"]


def damage(file: Path, how: str) -> None:
    """Delete a file, cut or grow it by a byte, make it no UTF-8, flip a bit or write junk."""
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[:-1])
    elif how == "grown":
        file.write_bytes(content + b"0")
    elif how == "not UTF-8":
        file.write_bytes(b"\xff" + content[1:])
    elif how.startswith("bit "):
        bit = int(how.removeprefix("bit "))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
    else:
        file.write_text(how)


@pytest.mark.parametrize("how", ["missing", "cut", "grown", "not UTF-8", "bit 3", "bit 17", *JUNK])
@pytest.mark.parametrize("name", ["a.txt", "inner/b.txt", SIZES])
def test_a_corrupted_directory_is_named_and_built_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: str,
) -> None:
    def build(folder: Path) -> None:
        (folder / "inner").mkdir()
        for path in ("a.txt", "inner/b.txt"):
            (folder / path).write_text("content of " + path)

    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)  # to caplog
    target = build_once(tmp_path / "a", build)
    whole = {file: file.read_bytes() for file in target.rglob("*.*")}
    damage(target / name, how)
    (target / "another").write_text("")
    if how.startswith("bit ") and name != SIZES:
        # the ranks that only compare sizes
        build_once(target, build, verify=False)
        assert (target / "another").exists()
    build_once(target, build)
    assert {file: file.read_bytes() for file in target.rglob("*.*")} == whole
    assert not (target / "another").exists()
    assert caplog.text.count(f"{target}: {name} is corrupted or missing.") == 1
    (target / "another").write_text("")
    build_once(target, build)
    assert (target / "another").exists(), "whole, so it is not built again"
    assert len(caplog.records) == 1


def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        Path("/dev/full").write_text("more")

    with pytest.raises(RunFailure, match="a: cannot be built: No space left .*\n.* LLAMA_FT_CACHE"):
        build_once(tmp_path / "a", build)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailure, match="file/a: cannot be built: Not a directory"):
        build_once(tmp_path / "file" / "a", lambda folder: None)
