"""The configuration on its way out."""

from pathlib import Path

import pytest

from llama_ft.config import Config, differences, load, to_yaml
from llama_ft.config.settings import SETTINGS

LINES = [
    "",
    "--use_peft --r 4 --target_modules all-linear --lr 3e-6 --validation 0.05 --use_wandb --wandb_tags a,b",
    "--use_peft --target_modules q_proj,v_proj --modules_to_save lm_head --wandb_name 1e5 --use_wandb",
    "--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 2 --precision fp32",
    "--lr_scheduler step --gamma 0.5 --output_dir somewhere --overwrite --no_run_validation",
    "--use_peft --from_peft_checkpoint folder --context_length 99",
]


@pytest.mark.parametrize("line", LINES)
def test_the_written_configuration_is_a_recipe_that_says_the_same(line: str, tmp_path: Path) -> None:
    config, _ = load(line.split(), paths=False)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config, "llama_ft 0.1\nwritten by a test"))
    again, places = load([f"--config={file}"], paths=False)
    one_run_only = ("checkpoint.output_dir", "checkpoint.overwrite")
    assert differences(again) == [it for it in differences(config) if not it.startswith(one_run_only)]
    assert len(places) == len(SETTINGS) - 4
    assert all(place.startswith(str(file)) for place in places.values())


def test_differences_name_setting_value_and_default() -> None:
    config, _ = load("--lr 2e-3 --use_peft --target_modules all-linear --context_length 512".split(), paths=False)
    assert differences(config) == [
        "train.lr = 0.002 (default 0.0001)",
        "peft.use_peft = true (default false)",
        "peft.target_modules = all-linear (default [q_proj,v_proj])",
        "data.context_length = 512 (default none)",
    ]
    assert differences(Config()) == []
