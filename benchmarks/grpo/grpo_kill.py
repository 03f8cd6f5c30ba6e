"""Count the answers that a killed run of GRPO generates again: recipes/finetuning.py and TRL's GRPOTrainer.

    python benchmarks/grpo/grpo_kill.py FOLDER

Both train SmolLM2-135M-Instruct after a few steps of fine-tuning, as in grpo_curves.py, for 6 steps of
4 answers, and save a checkpoint every second step. They are killed (SIGKILL) when an answer of step 4 is
scored, so the answers of steps 3 and 4 were generated after the newest checkpoint. Then they resume.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.grpo.grpo_curves import EXAMPLE, THEIRS, make_start, recipe, their_job
from benchmarks.shared.text_files import print_columns
from benchmarks.trainers.peers import PEERS, make_environment
from llama_ft.extensions.rollouts.rounds import list_rounds

STEPS = 6
KILLED_IN = 4
ANSWERS = 4  # per step: 2 to each of 2 prompts
REWARD = """
import os, signal, sys
from pathlib import Path
from typing import Any

sys.path.insert(0, {example!r})
import orders

SCORED = Path({folder!r}, "scored.txt")

def reward(prompt, answer, sample):
    with SCORED.open("a") as file:
        file.write("answer\\n")
    scored = len(SCORED.read_text().splitlines())
    if scored == {last} and not SCORED.with_name("killed").exists():
        SCORED.with_name("killed").touch()
        os.kill(os.{trainer}(), signal.SIGKILL)
    return orders.reward(prompt, answer, sample)
"""


def write_reward(folder: Path, trainer: str) -> Path:
    """Write a reward that counts its calls in `folder`, and kills the trainer once. `trainer`: function of
    os that gives its process id."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    last = (KILLED_IN - 1) * ANSWERS + 1
    file = folder / "rewards.py"
    values = {"example": str(EXAMPLE.parent), "folder": str(folder), "last": last}
    file.write_text(REWARD.format(**values, trainer=trainer))
    return file


def killed_and_resumed(first: list[str], second: list[str], folder: Path) -> None:
    """Run a command until it is killed, then the one that resumes."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    for number, command in enumerate((first, second)):
        with open(folder / f"{number}.log", "w") as log:
            ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        expected = 0 if number else -signal.SIGKILL
        assert ended.returncode == expected, (folder / f"{number}.log").read_text()[-3000:]


def ours(folder: Path) -> int:
    """Return how many answers are generated again."""
    place = folder / "killed-ours"
    reward = write_reward(place, "getppid")
    output = place / "run"
    flags = (
        f"--objective grpo --model_name {folder}/student --use_peft --precision fp32 --device cpu"
    )
    flags += f" --dataset {folder}/orders/train.jsonl --reward {reward}:reward --reward_processes 1"
    flags += " --prompts_per_step 2 --num_generations 2 --max_completion_length 16"
    flags += f" --max_train_step {STEPS} --save_steps 2 --output_dir {output} --resume auto"
    command = recipe("finetuning.py", *flags.split())
    killed_and_resumed(command, command, place)
    written = (place / "killed").stat().st_mtime
    only_scored = f"round {KILLED_IN}: its answers are on disk, and are only scored"
    again = 0 if only_scored in (place / "1.log").read_text() else ANSWERS
    for one in list_rounds(output)[: KILLED_IN - 1]:
        if (one / "samples.safetensors").stat().st_mtime > written:
            again += ANSWERS
    return again


def theirs(folder: Path, python: str) -> int:
    """Return how many answers are generated again."""
    place = folder / "killed-theirs"
    reward = write_reward(place, "getpid")
    output = place / "run"
    settings: dict[str, Any] = {
        "answers": ANSWERS,
        "num_generations": 2,
        "micro_batch": ANSWERS,
        "save_steps": 2,
    }
    settings |= {"seed": 0, "steps": STEPS, "reward": str(reward)}
    commands = []
    for resume in (False, True):
        job = their_job(folder, output, **settings, resume=resume)
        commands.append([python, str(THEIRS), str(job.rename(place / f"{resume}.json"))])
    killed_and_resumed(commands[0], commands[1], place)
    scored = len((place / "scored.txt").read_text().splitlines())
    before = (KILLED_IN - 1) * ANSWERS + 1
    return scored - before - (STEPS - KILLED_IN) * ANSWERS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="new, or that of grpo_curves.py")
    parser.add_argument("--trl_python", help="an interpreter that has TRL; default: one is made")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(os.environ.get("LLAMA_FT_CACHE", Path.home() / ".cache" / "llama_ft"))
    python = asked.trl_python or str(make_environment(PEERS["trl"], cache))
    make_start(folder)
    generated = 2 * ANSWERS
    rows = [["", "answers after the newest checkpoint", "generated again"]]
    rows.append(["llama_ft", str(generated), str(ours(folder))])
    rows.append(["TRL", str(generated), str(theirs(folder, python))])
    print_columns(rows)


if __name__ == "__main__":
    main()
