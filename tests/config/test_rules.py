"""Rules over several settings: impossible combinations, and settings without an effect."""

import pytest

from llama_ft.config import Config, check_device, differences, load, parse_size
from llama_ft.errors import UserError


@pytest.mark.parametrize(
    "line",
    [
        "--validation 1.5",
        "--warmup_ratio 0.1 --warmup_steps 10",
        "--lr 1e-5 --min_lr 1e-4",
        "--early_stopping_patience 5 --dataset a.jsonl",
        "--use_peft --modules_to_save lm_head --target_modules q_proj,lm_head",
        "--precision fp16 --device cpu",
        "--compile --use_liger",
        "--compile --activation_checkpointing full --activation_offload",
        "--compile --precision fp32",
        "--activation_checkpointing auto --no_plan",
        "--enable_fsdp --fsdp_wrap_policy size --activation_checkpointing selective",
        "--tiled_mlp 2048 --compile",
        "--tiled_mlp 2048 --enable_fsdp --fsdp_wrap_policy size",
        "--quantization",
        "--use_peft --use_dora --quantization 4bit",
        "--use_peft --train_vision all",
        "--use_peft --target_parameters experts.down_proj --lora_dropout 0.1",
        "--use_peft --quantization 4bit --block_size 96",
        "--max_shard_size 5",
        f"--collective_timeout {'9' * 40}h",
        "--resume auto",
        "--output_dir x --resume auto --overwrite",
        "--resume s3://bucket/run",
        "--output_dir x --save_to bucket/run",
        "--streaming",
        "--streaming --max_train_step 3 --validation 0.1",
        "--objective dpo --streaming --max_train_step 5",
        "--objective dpo --streaming --max_train_step 5 --use_peft --bias all",
        "--objective ipo --streaming --max_train_step 5 --use_peft --reference_model org/name",
        "--objective ipo --streaming --max_train_step 5 --use_peft --precompute_ref_log_probs",
        "--objective simpo --dataset_format messages",
        "--dataset_format preference",
        "--objective orpo --truncation split",
        "--objective kto --use_peft --dataset_format preference",
        "--dataset_format unpaired_preference",
        "--objective dpo --use_peft --undesirable_weight 2",
        "--objective kto --streaming --max_train_step 5",
        "--objective orpo --labels completion",
        "--dataset a.jsonl --score exact",
        "--validation 0.1 --score exact --truncation split",
        "--validation 0.1 --score exact --labels all",
        "--best_by eval/score",
        '--best_by eval/chat/loss --validation {"code":a.jsonl}',
        "--objective kto --use_peft --validation a.jsonl --best_by eval/rewards/accuracies",
        "--objective reward --validation a.jsonl --best_by eval/perplexity",
        "--validation a.jsonl --best_by eval/rewards/margins",
        "--objective dpo --score exact",
        "--objective distill --dataset alpaca",
        "--objective grpo --num_generations 100001",
        "--objective grpo --loss_type nll",
        "--objective grpo --loss_type dft",
        "--loss_type dapo",
        "--objective grpo --server_timeout 5m",
        "--objective grpo --server_requests 4",
        "--objective grpo --staleness 1",
        "--objective grpo --epsilon 0.1",
        "--objective grpo --epsilon_high 0.28",
        "--objective grpo --dataset a.jsonl --num_generations_eval 4",
        "--score_tokens 5",
        "--validation a.jsonl --validation_output b.jsonl",
    ],
)
def test_impossible_combinations_are_rejected(errors_of, line: str) -> None:
    (message,) = errors_of(*line.split())
    assert message.split()[0] in line


@pytest.mark.parametrize(
    "line",
    [
        "--use_mlflow --mlflow_tracking_uri https://me:pw@host",
        "--dataset http://me:hunter2@host/a.jsonl",
        "--dataset https://h/a.jsonl?X-Amz-Signature=hunter2",
        "--dataset [{path:https://h/a.jsonl?token=hunter2},{path:b.jsonl}]",
        "--model_name https://me:hunter2@host/model",
        "--save_to s3://me:hunter2@bucket/run",
    ],
)
def test_a_secret_in_a_setting_is_rejected_and_not_printed(errors_of, line: str) -> None:
    (message,) = errors_of(*line.split())
    assert message.startswith(
        f"{line.split()[-2]} has what looks like a password, a key or a signature"
    )
    assert "hunter2" not in message and "AKIA" not in message


@pytest.mark.parametrize(
    "line",
    [
        "--validation 0.05",
        "--max_train_step 10 --warmup_steps 9",
        "--dataset a.jsonl --validation b.jsonl --early_stopping_patience 5",
        "--use_peft --init_lora_weights gaussian --use_dora --use_rslora",
        "--use_liger --activation_checkpointing selective --activation_offload",
        "--use_liger auto --compile --no_plan",
        "--no_use_liger",
        "--use_peft --quantization 4bit --quant_type fp4 --block_size 128 --compute_dtype float32",
        "--use_mlflow --mlflow_tracking_uri sqlite:///runs.db --mlflow_tags tokens=5000000000",
        "--dataset https://host:8080/a@v1/a.jsonl?page=2&sort=key",
        "--dataset abfs://container@account.dfs.core.windows.net/a.jsonl",
        "--use_mlflow --mlflow_experiment /Users/me@example.org/tuning --mlflow_name run-1",
        "--low_cpu_fsdp",
        "--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 2 --fsdp_cpu_offload",
        "--run_validation false --eval_steps 0 --early_stopping_patience 0",
        "--use_dora false --modules_to_save none",
        "--use_peft --train_vision projector",
        "--freeze_LLM_only --train_vision projector",
        "--objective dpo --use_peft --quantization 4bit --beta 0.3 --dpo_label_smoothing 0.1 --truncation left",
        "--objective kto --use_peft --desirable_weight 1.5 --beta 0.2 --dataset_format unpaired_preference",
        "--objective kto --reference_model org/name",
        "--objective ipo --use_peft --streaming --max_train_step 5",
        "--objective kto --use_peft --precompute_ref_log_probs",
        "--objective dpo --reference_model org/name --beta 0.3",
        "--objective simpo --simpo_gamma 1 --dpo_label_smoothing 0.1 --dataset_format preference",
        "--objective reward --center_rewards_coefficient 0.01 --use_peft --quantization 8bit",
        "--objective grpo --server http://localhost:8000 --server_timeout 5m --staleness 1",
        "--objective grpo --num_iterations 2 --epsilon 0.1 --epsilon_high 0.28",
        "--objective grpo --dataset a.jsonl --validation 0.1 --num_generations_eval 4",
    ],
)
def test_valid_combinations_are_accepted(errors_of, line: str) -> None:
    assert errors_of(*line.split()) == []


def test_gpu_settings_are_rejected_when_device_auto_resolves_to_the_cpu() -> None:
    line = "--model_name m --precision fp16 --device_memory_fraction 0.6 --enable_fsdp --fsdp_cpu_offload"
    config, places = load(line.split(), paths=False)
    check_device(config, places, "cuda")
    with pytest.raises(UserError) as refused:
        check_device(config, places, "cpu")
    flags = [message.split()[0] for message in refused.value.messages]
    assert flags == ["--precision", "--fsdp_cpu_offload", "--device_memory_fraction"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("200 mb", 2 * 10**8),
        ("1.5KB", 1500),
        ("2TB", 2 * 10**12),
        ("24GiB", 24 * 2**30),
        ("7B", 7),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "line",
    [
        "--lr_scheduler linear --gamma 0.85",
        "--optimizer anyprecision --use_kahan_summation",
        "--target_modules q_proj",
        "--use_peft --from_peft_checkpoint folder --r 4",
        "--use_peft --freeze_layers",
        "--use_peft --freeze_LLM_only",
        "--objective dpo --use_peft --train_vision projector",
        "--enable_fsdp --fsdp_wrap_policy transformer --min_num_params 5",
        "--device cpu --compile",
        "--use_peft --quantization 8bit --quant_type fp4",
        "--use_peft --quantization 8bit --int8_threshold 3 --device cpu",
        "--no_run_validation --eval_steps 5",
        "--overwrite",
        "--no_save_model --save_dtype float32",
        "--num_epochs 2 --streaming --max_train_step 3",
        "--beta 0.2",
        "--objective ipo --use_peft --dpo_label_smoothing 0.1",
        "--objective orpo --simpo_gamma 1",
        "--objective orpo --reference_model org/name",
        "--reference_model org/name",
        "--objective simpo --use_peft --precompute_ref_log_probs",
        "--objective simpo --label_smoothing_factor 0.1",
        "--objective dpo --loss_type dft",
        "--loss_type dft --label_smoothing_factor 0.1",
        "--objective orpo --rpo_alpha 1",
        "--eval_tasks_limit 5",
        "--objective reward --eval_tasks hellaswag",
        "--objective reward --beta 0.2",
        "--objective reward --sample_tokens 8",
        "--objective orpo --center_rewards_coefficient 0.01",
    ],
)
def test_a_flag_without_effect_is_rejected(errors_of, line: str) -> None:
    (message,) = errors_of(*line.split())
    assert " has no effect " in message
    assert message.split()[0] in line


def test_a_loss_of_another_objective_is_rejected_with_those_of_this_one(
    errors_of, write_config
) -> None:
    known = "with objective grpo, this run has dapo, grpo, dr_grpo."
    assert errors_of("--objective=grpo", "--loss_type=nll") == [f"--loss_type is nll; {known}"]
    # config.yaml holds the default of each setting
    assert errors_of(write_config("train:\n  loss_type: nll\n"), "--objective=grpo") == []
    dft = write_config("train:\n  loss_type: dft\n")
    assert errors_of(dft, "--objective=grpo") == [f"mine.yaml:2: train.loss_type is dft; {known}"]


def test_sample_prompts_without_sample_tokens_are_rejected_with_the_missing_setting(
    errors_of,
) -> None:
    (message,) = errors_of("--sample_prompts", "Hi")
    assert message.endswith(
        "with sample_tokens 0. Set the longest answer too, such as sample_tokens 64."
    )


def test_a_config_can_contain_defaults_without_effect_but_no_other_values(
    errors_of, write_config
) -> None:
    assert (
        errors_of(write_config("train:\n  gamma: 0.85\npeft:\n  r: 8\n  use_peft: false\n")) == []
    )
    # as chosen there
    assert errors_of(write_config("model:\n  use_liger: false\ntrain:\n  device: cpu\n")) == []
    assert errors_of(write_config("train:\n  gamma: 0.9\npeft:\n  r: 4\n")) == [
        "mine.yaml:2: train.gamma has no effect with lr_scheduler cosine.",
        "mine.yaml:4: peft.r has no effect with use_peft false.",
    ]


def test_settings_of_a_config_that_a_flag_disables_get_their_defaults(write_config) -> None:
    lora = write_config(
        "peft:\n  use_peft: true\n  r: 4\n  target_modules: all-linear\ntrain:\n  eval_steps: 5\n"
    )
    config, places = load([lora, "--use_peft", "false", "--run_validation", "no"], paths=False)
    assert config.peft == Config().peft
    assert differences(config) == ["train.run_validation = false (default true)"]
    assert places == {"peft.use_peft": "--use_peft", "train.run_validation": "--run_validation"}
