"""Leftovers of a launcher in the environment, and user ids without a home directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RECIPE

from llama_ft.environment import Launch
from llama_ft.errors import UserError

MEETING_POINT = "MASTER_ADDR=localhost MASTER_PORT=29500"


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", (0, 1, 0, 1)),
        ("RANK= WORLD_SIZE=", (0, 1, 0, 1)),
        ("RANK=0", (0, 1, 0, 1)),
        ("LOCAL_RANK=3", (0, 1, 3, 1)),
        ("LOCAL_WORLD_SIZE=8 MASTER_ADDR=nowhere", (0, 1, 0, 8)),
        (f"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 {MEETING_POINT}", (3, 4, 1, 2)),
        (f"RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=a {MEETING_POINT}", (0, 1, 0, 1)),
        # srun with one task per node sets no variable of the node
        (f"RANK=1 WORLD_SIZE=2 {MEETING_POINT}", (1, 2, 0, 1)),
    ],
)
def test_the_place_of_a_process(text: str, place: tuple[int, ...]) -> None:
    assert Launch.from_environment(variables(text)) == place


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("RANK=1", "RANK must be below WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=1", "RANK must be below WORLD_SIZE"),
        ("RANK=2 WORLD_SIZE=2", "RANK must be below WORLD_SIZE"),
        ("WORLD_SIZE=2", "RANK is missing"),
        (f"WORLD_SIZE=2 LOCAL_RANK=0 {MEETING_POINT}", "RANK is missing"),
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR and MASTER_PORT are missing"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost", "MASTER_PORT is missing"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=29500", "MASTER_ADDR is missing"),
        ("TORCHELASTIC_RUN_ID=a", "MASTER_ADDR and MASTER_PORT are missing"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", "MASTER_PORT must be a number"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT must be a number"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK must be below LOCAL_WORLD_SIZE"),
        ("WORLD_SIZE=-1", "WORLD_SIZE must be a whole number of at least 1"),
        ("WORLD_SIZE=0", "WORLD_SIZE must be a whole number of at least 1"),
        ("RANK=x", "RANK must be a whole number of at least 0"),
        ("RANK=-1", "RANK must be a whole number of at least 0"),
        ("LOCAL_RANK=x", "LOCAL_RANK must be a whole number of at least 0"),
        ("LOCAL_WORLD_SIZE=1.5", "LOCAL_WORLD_SIZE must be a whole number of at least 1"),
        ("RANK=\N{SUPERSCRIPT TWO}", "RANK must be a whole number of at least 0"),
    ],
)
def test_leftovers_of_a_launcher_are_named(text: str, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong) as raised:
        Launch.from_environment(variables(text))
    (message,) = raised.value.messages
    for name in variables(text):
        assert f"{name}=" in message
        assert name in message.partition("unset ")[2]


def test_a_process_group_of_the_caller_needs_no_meeting_point() -> None:
    given = variables("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
    assert Launch.from_environment(given, has_group=True).rank == 1


def started(*prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """recipes/finetuning.py with a model that does not exist, in this environment only."""
    command = [*prefix, sys.executable, str(RECIPE), "--model_name", "./nope"]
    # the site-packages that the test has
    environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_leftovers_end_a_run_with_one_message() -> None:
    ended = started(LOCAL_RANK="x", HOME="/")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: environment LOCAL_RANK=x: LOCAL_RANK must be a whole")
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take another user id")
def test_a_user_without_a_home_needs_a_directory_for_caches(tmp_path: Path) -> None:
    other = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    can_read = subprocess.run([*other, sys.executable, "-c", "import llama_ft"], check=False)
    if can_read.returncode != 0:
        pytest.skip("another user cannot read this Python")
    ended = started(*other)
    assert ended.returncode == 2
    assert "HOME is not set, and user id 12345 has no home directory. Set HOME, or" in ended.stderr
    with_cache = started(*other, LLAMA_FT_CACHE=str(tmp_path))
    assert with_cache.stderr.startswith("error: --model_name ./nope: no such directory")
