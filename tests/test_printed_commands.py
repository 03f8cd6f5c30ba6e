"""Commands that are printed can be pasted: torchrun's own parser takes them, and then the recipe's."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import REPOSITORY
from torch.distributed.run import get_args_parser

from llama_ft.config import load
from llama_ft.config.dump import help_text
from llama_ft.config.settings import SETTINGS
from llama_ft.plan.fit import Fit, Ladder, changed
from llama_ft.plan.types import Plan, PlanRequest

PLAN = Plan("cuda", 1, [], [], 0, 0, 0, 0, 0, 0, {}, "", 0, 512, True, 1.0)


def words_of_script(command: str) -> list[str]:
    """What the script gets, by bash and by torchrun's parser, which ends the test where torchrun would stop."""
    first, *words = shlex.split(command)
    if first == "torchrun":
        return list(get_args_parser().parse_args(words).training_script_args)
    return words[1:]


@pytest.mark.parametrize("name", SETTINGS)
def test_torchrun_hands_every_flag_on(name: str) -> None:
    flag = SETTINGS[name].flag
    assert words_of_script(f"torchrun --nproc_per_node 2 recipes/finetuning.py {flag} 1") == [flag, "1"]
    assert words_of_script(f"torchrun --nproc_per_node 2 recipes/finetuning.py {flag}=1") == [f"{flag}=1"]


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (2, 1), (16, 2)])
def test_the_commands_of_fit_make_the_recipe_that_was_planned(world: int, nodes: int, tmp_path: Path) -> None:
    typed = ["--model_name", "some model", "--dataset", "my rows.jsonl", "--use_peft", "--peft.r", "16"]
    typed += ["--target_modules", "q_proj,v_proj", "--run_validation", "false", "--lr=2e-4"]
    config, _ = load(typed, paths=False)
    request = PlanRequest(config, Path("some model"), world, world // nodes, "cuda")
    fit = changed(config, {"mode": "4bit", "activation_checkpointing": "full", "enable_fsdp": True}, "cuda")
    assert fit is not None
    answers = [Fit(fit, ["--quantization 4bit"], "nothing", PLAN)]
    folder = tmp_path / "with blanks"
    Ladder(request, print, 1, PLAN, True, print, answers).write(folder)
    [command] = [line.strip("# ") for line in (folder / "fit-1.yaml").read_text().splitlines() if "--config" in line]
    assert command.startswith("torchrun ") == (world > 1)
    assert load(words_of_script(command), paths=False)[0] == fit


def test_torchrun_takes_the_commands_of_the_help_and_of_the_recipes() -> None:
    texts = [help_text("", script="recipes/finetuning.py").replace("[flags]", "")]
    for file in REPOSITORY.glob("configs/*.yaml"):
        texts.append(file.read_text().replace("\\\n#", " ").replace("\n#", "\n"))
    commands = re.findall(r"^ *(torchrun .*recipes/finetuning\.py.*)$", "\n".join(texts), re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        load(words_of_script(command), paths=False)
