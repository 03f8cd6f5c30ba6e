"""Commands that are printed can be pasted: torchrun's own parser takes them, and then the recipe's."""

import re
import shlex

import pytest
from conftest import REPOSITORY
from torch.distributed.run import get_args_parser

from llama_ft.config import load
from llama_ft.config.dump import help_text
from llama_ft.config.settings import SETTINGS


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


def test_torchrun_takes_the_commands_of_the_help_and_of_the_recipes() -> None:
    texts = [help_text("", script="recipes/finetuning.py").replace("[flags]", "")]
    for file in REPOSITORY.glob("configs/*.yaml"):
        texts.append(file.read_text().replace("\\\n#", " ").replace("\n#", "\n"))
    commands = re.findall(r"^ *(torchrun .*recipes/finetuning\.py.*)$", "\n".join(texts), re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        load(words_of_script(command), paths=False)
