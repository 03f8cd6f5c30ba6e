"""The whole command line layer in a separate process, as a recipe calls it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_ft.config.reading.dump import COMMON_SETTINGS, exit_with_help
from llama_ft.config.settings.settings import SETTINGS

SOURCE = Path(__file__).resolve().parents[2] / "src"
SCRIPT = """
import sys
from pathlib import Path
from llama_ft.config import check_command_line, differences, load_flags

check_command_line("What it does.\\n\\nMore.", Path("demo.yaml"))
import fire

@fire.decorators.SetParseFn(str)
def main(**flags):
    config, places = load_flags(flags, Path("demo.yaml"))
    print(*differences(config), sep="\\n")
    print(places)

fire.Fire(main)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "recipe.py").write_text(SCRIPT)
    (tmp_path / "demo.yaml").write_text("train:\n  seed: 5\n")

    def popen(*argv: str, rank: int | None = None) -> subprocess.Popen[str]:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        environment["PYTHONPATH"] = str(SOURCE)
        if rank is not None:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen(
            [sys.executable, "recipe.py", *argv],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return popen


def test_a_good_command_line_reaches_the_recipe_without_torch(start: Start) -> None:
    process = start("--lr", "1e-3")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.splitlines() == [
        "train.lr = 0.001 (default 0.0001)",
        "train.seed = 5 (default 42)",
        "{'train.seed': 'demo.yaml:2', 'train.lr': '--lr'}",
    ]


def test_user_errors_are_printed_on_rank_0_with_exit_code_2(start: Start) -> None:
    process = start("--lrr", "1", "--model_name", "./nope", rank=0)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == (
        "error: --lrr is not a flag. Did you mean --lr?\nerror: --model_name ./nope: no such directory.\n"
    )


def test_another_rank_prints_nothing_and_waits_for_rank_0_to_print(start: Start) -> None:
    other = start("--lrr", "1", rank=1)
    first = start("--lrr", "1", rank=0)
    first.communicate()
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=2)
    other.terminate()  # as torchrun does when rank 0 has left
    assert other.communicate() == ("", "")


def test_help_lists_the_common_flags_and_help_all_every_flag_within_2_seconds(
    start: Start,
) -> None:
    out, _ = start("--help").communicate()
    listed = re.findall(r"^  (--\S+)", out, re.MULTILINE)
    assert listed == [SETTINGS[name].flag for name in COMMON_SETTINGS]
    assert "--help all prints" in out

    before = os.times()  # of the processor: other load on the machine is not its fault
    process = start("--use_peft", "--help", "all", "--nonsense")
    out, err = process.communicate()
    after = os.times()
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 2
    )
    assert (process.returncode, err) == (0, "")
    assert out.startswith("What it does.\n\nUsage:\n  python recipe.py [flags]\n")
    assert "  --lr X                            Peak learning rate. [default: 0.0001]\n" in out
    for setting in SETTINGS.values():
        assert len(re.findall(rf"^  {re.escape(setting.flag)}\b", out, re.MULTILINE)) == 1
    assert max(map(len, out.splitlines())) <= 100


TOOLS = {
    "plan": ("[flags]", "--nproc"),
    "check": ("[RUN] [flags]", "--output_dir"),
    "inference": ("[MODEL] [flags]", "--prompt"),
    "evaluate": ("[MODEL...] [flags]", "--base"),
    "export": ("CHECKPOINT OUT [flags]", "--merge"),
    "report": ("[RUN...] [flags]", "--names"),
    "watch": ("[RUN] [flags]", "--price"),
    "rollout": ("[MODEL] [flags]", "--dataset"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_help_of_a_tool_begins_with_its_usage_and_its_own_flags(tool: str) -> None:
    script = SOURCE.parent / "recipes" / f"{tool}.py"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(script), "--help"]
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    words, first_flag = TOOLS[tool]
    assert f"\n\nUsage:\n  python {script} {words}\n" in out.stdout
    listed = re.findall(r"^  (--\w+)", out.stdout, re.MULTILINE)
    assert listed[0] == first_flag
    assert len(listed) == len(set(listed))
    long = [line for line in out.stdout.splitlines() if len(line) > 100]
    assert not long


def test_help_is_quiet_if_its_reader_stops_reading(start: Start) -> None:
    process = start("--help", "all")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == ("", 0)


def test_help_leaves_the_signals_of_the_process_as_they_are() -> None:
    """Without Python's handling of SIGPIPE, a server in this process would end it as soon as a
    client is killed."""
    with pytest.raises(SystemExit):
        exit_with_help("")
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
