"""The text of --help."""

from llama_ft.config.dump import help_text
from llama_ft.config.settings import SETTINGS

TEXT = help_text("Fine-tune a model.", "recipes/finetuning.py")


def test_every_setting_is_listed_once_with_its_default() -> None:
    lines = TEXT.splitlines()
    for name in SETTINGS:
        flag = "--quantization" if name == "mode" else f"--{name}"
        assert len([line for line in lines if line.startswith(f"  {flag} ")]) == 1, name
    assert " ".join(TEXT.split()).count("default: ") == len(SETTINGS) + 1  # init_lora_weights explains its own default


def test_it_fits_a_hundred_columns() -> None:
    assert max(map(len, TEXT.splitlines())) <= 100
