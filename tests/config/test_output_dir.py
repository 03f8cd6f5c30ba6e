"""A run's directory: what is refused, and what --overwrite may delete."""

import os
from pathlib import Path

import pytest

from llama_ft.config.paths import (
    RUN_MARKER,
    STORE_PACKAGES,
    model_dir_problem,
    not_writable,
    unusual_output_dir,
)


def make_run(folder: Path) -> Path:
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    (folder / "checkpoints" / "step-000010" / "trainer.json").write_text("{}")
    (folder / "model").mkdir()
    for name in (RUN_MARKER, "status.json", "config.yaml", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["new", "deep/er/still", "."])
def test_a_new_or_empty_directory_is_accepted_and_not_created(
    errors_of, tmp_path: Path, name: str
) -> None:
    assert errors_of("--output_dir", name, paths=True) == []
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_rejected_without_overwrite(errors_of, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (message,) = errors_of("--output_dir", "run", paths=True)
    assert message.startswith("--output_dir run: already holds a run.")
    assert errors_of("--output_dir", "run", "--overwrite", paths=True) == []
    (tmp_path / "killed early" / "status.json").mkdir(parents=True)
    (tmp_path / "killed early" / RUN_MARKER).touch()
    (message,) = errors_of("--output_dir", "killed early", paths=True)
    assert "already holds a run" in message
    # without a run's marker
    (tmp_path / "mine" / "checkpoints" / "step-000100").mkdir(parents=True)
    for more in ([], ["--overwrite"], ["--resume", "auto"]):
        (message,) = errors_of("--output_dir", "mine", *more, paths=True)
        assert message.startswith("--output_dir mine: holds checkpoints but no .llama_ft-run")


def test_an_existing_run_can_be_resumed(errors_of, tmp_path: Path, monkeypatch) -> None:
    for name in ("run", "other"):
        make_run(tmp_path / name)
    for resume in ("auto", "run", "run/checkpoints/step-000010"):
        assert errors_of("--output_dir", "run", "--resume", resume, paths=True) == []
    (message,) = errors_of(
        "--output_dir", "run", "--resume", "other/checkpoints/step-000010", paths=True
    )
    assert "already holds a run" in message
    assert len(errors_of("--output_dir", "run", paths=True)) == 1
    # what the attempt before this one has left
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert errors_of("--output_dir", "run", paths=True) == []


def test_overwrite_does_not_delete_what_the_run_resumes_from_or_reads(
    errors_of, tmp_path: Path, monkeypatch
) -> None:
    for name in ("run", "other"):
        make_run(tmp_path / name)
    (tmp_path / "run" / "model" / "adapter_config.json").write_text("{}")
    (tmp_path / "run" / "model" / "adapter_model.safetensors").touch()
    resumed = "run/checkpoints/step-000010"
    elsewhere = "other/checkpoints/step-000010"
    for restarts in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        (message,) = errors_of(
            "--output_dir", "run", "--overwrite", "--resume", resumed, paths=True
        )
        assert "--overwrite would delete run/checkpoints/step-000010, which resume reads" in message
        assert (
            errors_of("--output_dir", "run", "--overwrite", "--resume", elsewhere, paths=True) == []
        )
        adapter = ["--use_peft", "--from_peft_checkpoint", "run/model"]
        (message,) = errors_of("--output_dir", "run", "--overwrite", *adapter, paths=True)
        assert "--overwrite would delete run/model, which from_peft_checkpoint reads" in message


def test_overwrite_replaces_only_files_that_an_export_wrote(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    for card in (None, "# My notes\n", "---\ntags:\n- llama\n---\n"):
        if card is not None:
            (tmp_path / "README.md").write_text(card)
        for overwrite in (True, False):
            assert "llama_ft did not write" in str(model_dir_problem(str(tmp_path), overwrite, {}))
    (tmp_path / "README.md").write_text("---\ntags:\n- llama_ft\n- lora\n---\n")
    assert "replace that model with --overwrite" in str(model_dir_problem(str(tmp_path), False, {}))
    assert model_dir_problem(str(tmp_path), True, {}) is None
    for name in (
        "train.py",
        "tokenizer_notes.txt",
        "my.model",
        "additional_chat_templates/thesis.tex",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        assert f"contains files that are not part of a model ({name})" in str(
            model_dir_problem(str(tmp_path), True, {})
        )
        (tmp_path / name).unlink()
    header = "tags:\n- llama_ft\ncopied_from_base_model:\n- LICENSE\n- chat_template.json\n"
    (tmp_path / "README.md").write_text(f"---\n{header}---\n")
    (tmp_path / "LICENSE").touch()
    assert model_dir_problem(str(tmp_path), True, {}) is None
    (tmp_path / "NOTICE").touch()
    assert "contains files that are not part of a model (NOTICE)" in str(
        model_dir_problem(str(tmp_path), True, {})
    )


def test_a_file_where_the_output_directory_should_be_is_named(errors_of, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert errors_of("--output_dir", "file", paths=True) == [
        "--output_dir file: is not a directory."
    ]
    (message,) = errors_of("--output_dir", "/proc/run", paths=True)
    assert message.startswith("--output_dir /proc/run: /proc cannot be written to: "), (
        "even to root"
    )


@pytest.mark.parametrize("name", ["red\x1b[31m", "latin-1\udcff", "bell\x07"])
def test_a_directory_with_control_characters_or_not_in_utf_8_is_rejected(
    errors_of, tmp_path: Path, name: str
) -> None:
    (message,) = errors_of("--output_dir", name, paths=True)
    assert "has control characters, or is not UTF-8" in message
    assert errors_of("--output_dir", "r\u00e4umlich \u96ea", paths=True) == []


def test_other_ranks_accept_the_run_directory_that_rank_0_created(
    errors_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setenv("RANK", "1")
    assert errors_of("--output_dir", "run", paths=True) == []


def test_an_output_directory_with_other_files_or_inside_the_model_gives_a_warning(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("a.md", "b.md", "c.md", "d.md"):
        (docs / name).touch()
    warning = unusual_output_dir(str(docs), str(model))
    assert warning is not None and "docs has other files (a.md, b.md, c.md, ...)" in warning
    for inside in (model, model / "tuned"):
        warning = unusual_output_dir(str(inside), f"{model}/")
        assert warning is not None and "is in the directory of the model" in warning
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run")
    for usual in ("new", "empty", "run"):
        assert unusual_output_dir(str(tmp_path / usual), str(model)) is None
    assert unusual_output_dir(str(tmp_path / "new"), "org/name") is None


def test_directories_left_by_killed_probes_are_removed(tmp_path: Path) -> None:
    left, fresh, full = (tmp_path / f".llama_ft_{name * 8}" for name in "abc")
    for folder in (left, fresh, full):
        folder.mkdir()
    (full / "notes.txt").touch()
    for folder in (left, full):
        os.utime(folder, (0, 0))
    assert not_writable(tmp_path) is None
    assert sorted(tmp_path.iterdir()) == [fresh, full]


@pytest.mark.parametrize("store", ["run", "run/", "link", "run/checkpoints", "run/model/../model"])
def test_a_store_in_the_files_of_the_run_is_rejected(errors_of, tmp_path: Path, store: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    flags = ["--output_dir", "run", "--save_to"]
    (message,) = errors_of(*flags, f"file://{tmp_path}/{store}", paths=True)
    assert message.startswith(f"--save_to file://{tmp_path}/{store}: is output_dir run itself")
    for valid in (f"file://{tmp_path}/store", f"file://{tmp_path}", "s3://run/run"):
        assert errors_of(*flags, valid, paths=True) == []


def test_a_store_without_its_package_or_protocol_is_rejected(
    errors_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORE_PACKAGES, "gs", "no_such_package")
    for url, expected in {
        "gs://bucket/run": "needs the package no_such_package: pip install no_such_package",
        "nowhere://bucket/run": "expected a protocol that fsspec knows, such as s3, gs, az or file.",
    }.items():
        (message,) = errors_of("--output_dir", "run", "--save_to", url, paths=True)
        assert message == f"--save_to {url}: {expected}"
