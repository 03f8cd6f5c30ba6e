"""What is in launch/: checked by the tools of those it is for, and run as far as one machine
can."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, REPOSITORY, run
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser

from llama_ft.config import load

LAUNCH = REPOSITORY / "launch"
RUN = LAUNCH / "run.sh"
KEEP = LAUNCH / "skypilot" / "keep.sh"
SBATCH = LAUNCH / "slurm" / "finetune.sbatch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), SBATCH])
SKYPILOT = yaml.safe_load((LAUNCH / "skypilot" / "finetune.yaml").read_text())
_, JOB = yaml.safe_load_all((LAUNCH / "kubernetes" / "finetune.yaml").read_text())
TEMPLATE = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
[CONTAINER] = TEMPLATE["spec"]["containers"]


def in_shell(text: str, **variables: str) -> list[str]:
    """The words of a command that a shell would make of `text`."""
    listed = "printf '%s\\0' " + text.replace("\\\n", " ")
    words = subprocess.run(
        ["bash", "-uc", listed], env=variables, capture_output=True, text=True, check=True
    ).stdout
    return words.split("\0")[:-1]


def slurm_command() -> list[str]:
    found = re.search(r"^launch/run\.sh.*?(?= &$)", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    text = found[0].replace('"$@"', "--config configs/demo.yaml --lr 1e-4")
    text = text.replace('"${model[@]}"', "--model_name /tmp/models/m").replace(
        '"${stop_after[@]}"', "--stop_after 90s"
    )
    text = text.replace("$((20000 + SLURM_JOB_ID % 10000))", "20001")
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1"}
    return in_shell(text, OUTPUT_DIR="output/x", processes="8", first_node="n1", logs="l", **slurm)


def skypilot_command() -> list[str]:
    text = SKYPILOT["run"]
    variables = {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "first_node": "10.0.0.1",
    }
    variables |= {"PATH": os.environ["PATH"], **SKYPILOT["envs"]}
    return in_shell(text[text.index("launch/skypilot/keep.sh") :], **variables)


COMMANDS = {
    "slurm": slurm_command,
    "kubernetes": lambda: CONTAINER["args"],
    "skypilot": skypilot_command,
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_the_scripts(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert subprocess.run([shellcheck, "--external-sources", script], timeout=60).returncode == 0
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("where", COMMANDS)
def test_torchrun_and_the_recipe_accept_every_flag_and_the_run_is_resumed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    command = COMMANDS[where]()
    launch = get_args_parser().parse_args(command[command.index("torchrun") + 1 :])
    assert launch.training_script == "recipes/finetuning.py"
    config, _ = load(launch.training_script_args, paths=False)
    assert config.checkpoint.resume == "auto"
    assert config.checkpoint.output_dir == command[command.index("launch/run.sh") + 1]
    assert config.checkpoint.save_model
    if where != "slurm":  # whose flags are the caller's
        assert str(config.data.dataset).endswith("my_data.jsonl")
    if where != "kubernetes":  # where elasticPolicy says it
        assert _parse_rendezvous_config(launch.rdzv_conf) == {
            "read_timeout": "600",
            "join_timeout": "1800",
        }


def status(state: str, exit_code: int | None, step: int = 1) -> str:
    record = json.dumps({"state": state, "step": step, "exit_code": exit_code, "message": ""})
    return f"echo {shlex.quote(record)} > status.json"


ATTEMPTS = {
    "finished": (f"{status('finished', 0)}", 0),
    "a user error in a setting": (f"{status('failed', 2)}; exit 1", 2),
    "stopped by --stop_after": (f"mkdir -p checkpoints/step-000020; {status('stopped', 0)}", 138),
    "a rank was lost after a checkpoint": (
        f"mkdir -p checkpoints/step-000020; {status('failed', 1)}; exit 1",
        138,
    ),
    "a rank was lost, and no checkpoint is newer": (f"{status('failed', 1)}; exit 1", 1),
    "stopped by SIGTERM": (
        f"mkdir -p checkpoints/step-000020; {status('stopped', 143)}; exit 1",
        143,
    ),
    "stopped by Ctrl-C": (f"{status('stopped', 130)}; exit 1", 143),
    "killed without a word": ("kill -KILL $$", 1),
}


@pytest.mark.parametrize("end", ATTEMPTS)
def test_the_exit_code_decides_whether_to_restart(end: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    # an earlier attempt's
    subprocess.run(["bash", "-c", status("stopped", 0)], cwd=tmp_path, check=True)
    command, expected = ATTEMPTS[end]
    finished = subprocess.run([RUN, tmp_path, "bash", "-c", command], cwd=tmp_path, timeout=60)
    assert finished.returncode == expected


def signalled(number: int, command: str, folder: Path) -> tuple[int, float]:
    """Exit code of launch/run.sh that gets a signal when its command has written `begun`, and how
    long it took then."""
    process = subprocess.Popen([RUN, folder, "bash", "-c", command], cwd=folder)
    deadline = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sent = time.monotonic()
    process.send_signal(number)
    return process.wait(60), time.monotonic() - sent


def test_a_signal_is_forwarded_and_the_command_awaited(tmp_path: Path) -> None:
    command = (
        "trap 'sleep 0.5; touch saved; exit 1' TERM; touch begun; while true; do sleep 0.05; done"
    )
    exit_code, _ = signalled(signal.SIGTERM, command, tmp_path)
    assert (exit_code, (tmp_path / "saved").exists()) == (143, True)


@pytest.mark.parametrize(
    ("command", "expected"), [("mkdir -p checkpoints/step-000001; ", 138), ("", 1)]
)
def test_at_the_time_limit_a_checkpoint_decides_whether_to_restart(
    command: str, expected: int, tmp_path: Path
) -> None:
    exit_code, seconds = signalled(signal.SIGUSR1, f"{command}touch begun; exec sleep 20", tmp_path)
    assert exit_code == expected
    assert seconds < 10


@pytest.mark.slow
def test_a_real_run_is_stopped_resumed_and_finished(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}."}) + "\n" for n in range(8))
    )
    folder = tmp_path / "run"
    flags = f"--model_name {save_model(tmp_path / 'model')} --dataset {rows} --output_dir {folder} --resume auto"
    flags += " --device cpu --batch_size_training 1 --context_length 16 --batching_strategy padding --num_epochs 1"
    command = [str(RUN), str(folder), sys.executable, str(RECIPE), *flags.split(), "--no_plan"]
    assert run([*command, "--lr=-1"]).exit_code == 2
    stopped = run([*command, "--stop_after", "1s"])  # which is over before the first step is
    assert (stopped.exit_code, "stopped by --stop_after 1s after step 1" in stopped.output) == (
        138,
        True,
    )
    went_on = run(command)
    assert (went_on.exit_code, (folder / "model" / "config.json").exists()) == (0, True)
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_the_files_kept_of_a_lost_machine_are_enough_to_resume(tmp_path: Path) -> None:
    first = tmp_path / "first"
    kept = tmp_path / "kept"
    second = tmp_path / "second"
    lines = f"mkdir -p {first}/checkpoints/step-000010 && cd {first} && echo 1 > checkpoints/step-000010/trainer.json"
    lines += "; echo 1 > metrics.jsonl; mkdir -p checkpoints/.step-000020; sleep 3; mkdir checkpoints/step-000020"
    lines += "; rm -r checkpoints/step-000010; exit 138"
    assert subprocess.run([KEEP, first, kept, "bash", "-c", lines], timeout=60).returncode == 138
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == ["step-000020"]
    (kept / "checkpoints" / "step-000030").mkdir()  # a copy that was cut off
    assert (
        subprocess.run([KEEP, second, kept, "ls", second / "checkpoints"], timeout=60).returncode
        == 0
    )
    assert [path.name for path in (second / "checkpoints").iterdir()] == ["step-000020"]
    assert (second / "metrics.jsonl").read_text() == "1\n"


def test_a_model_is_copied_to_a_node_once_and_completely(tmp_path: Path) -> None:
    script = LAUNCH / "slurm" / "copy_to_node.sh"
    model = tmp_path / "m"
    disk = tmp_path / "disk"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (disk / "m.part").mkdir(parents=True)  # of a copy that was cut off
    (disk / "m.part" / "half").touch()
    copies = [subprocess.Popen([script, f"{model}/", disk]) for _ in range(3)]
    assert [copy.wait(60) for copy in copies] == [0, 0, 0]
    assert [path.name for path in (disk / "m").iterdir()] == ["config.json"]
