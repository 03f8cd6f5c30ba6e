"""Settings without an effect are refused; those that a flag made moot are set back."""

import pytest

from llama_ft.config import Config, differences, load


@pytest.mark.parametrize(
    "line",
    [
        "--lr_scheduler linear --gamma 0.85",
        "--optimizer anyprecision --use_kahan_summation",
        "--target_modules q_proj",
        "--use_peft --from_peft_checkpoint folder --r 4",
        "--use_peft --freeze_layers",
        "--enable_fsdp --fsdp_wrap_policy transformer --min_num_params 5",
        "--device cpu --compile",
        "--use_peft --quantization 8bit --quant_type fp4",
        "--use_peft --quantization 8bit --int8_threshold 3 --device cpu",
        "--no_run_validation --eval_steps 5",
        "--overwrite",
        "--no_save_model --save_dtype float32",
        "--num_epochs 2 --streaming --max_train_step 3",
    ],
)
def test_a_flag_without_effect_is_refused(mistakes, line: str) -> None:
    (message,) = mistakes(*line.split())
    assert " has no effect " in message
    assert message.split()[0] in line


@pytest.mark.parametrize(
    "line",
    [
        "--low_cpu_fsdp",
        "--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 2 --fsdp_cpu_offload",
        "--run_validation false --eval_steps 0 --early_stopping_patience 0",
        "--use_dora false --modules_to_save none",
    ],
)
def test_a_flag_with_effect_or_asking_for_nothing_is_fine(mistakes, line: str) -> None:
    assert mistakes(*line.split()) == []


def test_a_recipe_may_hold_defaults_that_have_no_effect_and_no_other_values(mistakes, recipe) -> None:
    assert mistakes(recipe("train:\n  gamma: 0.85\npeft:\n  r: 8\n  use_peft: false\n")) == []
    assert mistakes(recipe("train:\n  gamma: 0.9\npeft:\n  r: 4\n")) == [
        "mine.yaml:2: train.gamma has no effect with lr_scheduler cosine.",
        "mine.yaml:4: peft.r has no effect with use_peft false.",
    ]


def test_what_a_flag_makes_moot_in_a_recipe_is_set_back(recipe) -> None:
    lora = recipe("peft:\n  use_peft: true\n  r: 4\n  target_modules: all-linear\ntrain:\n  eval_steps: 5\n")
    config, places = load([lora, "--use_peft", "false", "--run_validation", "no"], paths=False)
    assert config.peft == Config().peft
    assert differences(config) == ["train.run_validation = false (default true)"]
    assert places == {"peft.use_peft": "--use_peft", "train.run_validation": "--run_validation"}
