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
SBATCH = LAUNCH / "slurm" / "finetune.sbatch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), SBATCH])
SKYPILOT = yaml.safe_load((LAUNCH / "skypilot" / "finetune.yaml").read_text())
RUNTIME, TRAIN_JOB = yaml.safe_load_all((LAUNCH / "kubernetes" / "finetune.yaml").read_text())
[NODE] = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
NODE_JOB = NODE["template"]["spec"]
_, PYTORCHJOB = yaml.safe_load_all((LAUNCH / "kubernetes" / "pytorchjob_v1.yaml").read_text())
WORKER = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


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
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "first_node": "10.0.0.1",
    }
    variables |= {"PATH": os.environ["PATH"], **SKYPILOT["envs"]}
    return in_shell(text[text.index("launch/run.sh") :], **variables)


COMMANDS = {
    "slurm": slurm_command,
    "kubernetes": lambda: TRAIN_JOB["spec"]["trainer"]["args"],
    "kubernetes, PyTorchJob": lambda: WORKER["containers"][0]["args"],
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
    if where in ("kubernetes", "skypilot"):  # whose machines share no disk
        assert config.checkpoint.save_to is not None
        assert config.checkpoint.save_to.startswith("s3://my-bucket/")
    rendezvous = _parse_rendezvous_config(launch.rdzv_conf)
    if where == "kubernetes":
        assert (launch.rdzv_backend, rendezvous) == ("static", {"timeout": "1800"})
    elif where != "kubernetes, PyTorchJob":  # where elasticPolicy says it
        assert rendezvous == {"read_timeout": "600", "join_timeout": "1800"}


def test_the_kubernetes_objects_are_those_of_kubeflow_trainer() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime = models.TrainerV1alpha1TrainingRuntime.from_dict(RUNTIME)
    job = models.TrainerV1alpha1TrainJob.from_dict(TRAIN_JOB)
    # unknown fields are lost on the way
    assert runtime.to_dict() == RUNTIME
    assert job.to_dict() == TRAIN_JOB
    reference = TRAIN_JOB["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])
    # by which the operator finds where to put image, arguments and torchrun's variables
    assert NODE["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    [container] = NODE_JOB["template"]["spec"]["containers"]
    assert container["name"] == "node"
    volumes = {volume["name"] for volume in NODE_JOB["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def job_failure(exit_code: int, is_disrupted: bool) -> tuple[str, str]:
    """Reason and message with which a Job fails after the end of a pod. The texts are those of
    Kubernetes' pkg/controller/job/pod_failure_policy.go."""
    for index, rule in enumerate(NODE_JOB["podFailurePolicy"]["rules"]):
        matched = f"matching FailJob rule at index {index}"
        if is_disrupted and "onPodConditions" in rule:
            return "PodFailurePolicy", f"Pod a/b has condition DisruptionTarget {matched}"
        if exit_code in rule.get("onExitCodes", {}).get("values", []):
            failed = f"Container node for pod a/b failed with exit code {exit_code}"
            return "PodFailurePolicy", f"{failed} {matched}"
    assert NODE_JOB["backoffLimit"] == 0
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def job_set_action(reason: str, message: str) -> str:
    """What JobSet does then: the first rule that matches, as its documentation says."""
    for rule in RUNTIME["spec"]["template"]["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        has_message = any(re.search(pattern, message) for pattern in patterns)
        if reason in rule["onJobFailureReasons"] and has_message:
            return str(rule["action"])
    return "RestartJobSet"  # at most maxRestarts times


@pytest.mark.parametrize(
    ("exit_code", "is_disrupted", "action"),
    [
        (138, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (2, False, "FailJobSet"),
        (1, False, "RestartJobSet"),
        (137, False, "RestartJobSet"),
    ],
)
def test_exit_codes_of_a_pod_restart_the_job_or_end_it(
    exit_code: int, is_disrupted: bool, action: str
) -> None:
    assert job_set_action(*job_failure(exit_code, is_disrupted)) == action


@pytest.mark.parametrize("job", ["TrainJob", "PyTorchJob"])
def test_a_pod_has_time_for_a_checkpoint_after_sigterm(job: str) -> None:
    pod = NODE_JOB["template"]["spec"] if job == "TrainJob" else WORKER
    [container] = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    given = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 60 <= given < pod["terminationGracePeriodSeconds"]


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
    "a rank was lost after a checkpoint was fetched": (
        f"mkdir -p checkpoints/step-000020; echo step-000020 > .fetched; {status('failed', 1)}; exit 1",
        1,
    ),
    "a rank was lost after a checkpoint was fetched and the next one saved": (
        f"mkdir -p checkpoints/step-0000{{20,30}}; echo step-000020 > .fetched; {status('failed', 1)}; exit 1",
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


def test_the_directory_of_another_user_on_a_node_is_rejected(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to another user")
    script = LAUNCH / "slurm" / "copy_to_node.sh"
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("mine")
    disk = tmp_path / "disk" / "models"
    foreign = disk / "m" / "config.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("of somebody else")
    for path in (disk, foreign.parent, foreign):
        os.chown(path, 65534, 65534)
    finished = run([str(script), str(model), str(disk)])
    assert finished.exit_code == 2 and f"{disk} is not a directory of yours" in finished.output
    link = tmp_path / "link"
    link.symlink_to(model)
    assert run([str(script), str(model), str(link)]).exit_code == 2
    os.chown(disk, 0, 0)
    os.chmod(disk, 0o777)
    assert run([str(script), str(model), str(disk)]).exit_code == 0
    assert foreign.read_text() == "mine" and disk.stat().st_mode & 0o022 == 0
    made = LAUNCH / "slurm" / "node_disk.sh"
    assert run([str(made), str(tmp_path / "a" / "b")]).exit_code == 0
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
