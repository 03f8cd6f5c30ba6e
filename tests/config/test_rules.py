"""Rules over several settings."""

import pytest

from llama_ft.config import check_device, load, parse_size
from llama_ft.errors import UserError


@pytest.mark.parametrize(
    "line",
    [
        "--validation 1.5",
        "--max_train_step 10 --warmup_steps 10",
        "--early_stopping_patience 5 --dataset a.jsonl",
        "--use_peft --modules_to_save lm_head --target_modules q_proj,lm_head",
        "--attn_implementation flash_attention_3 --precision fp32",
        "--precision fp16 --device cpu",
        "--compile --use_liger",
        "--compile --activation_checkpointing full --activation_offload",
        "--compile --precision fp32",
        "--activation_checkpointing auto --no_plan",
        "--enable_fsdp --fsdp_wrap_policy size --activation_checkpointing selective",
        "--quantization",
        "--use_peft --use_dora --quantization 4bit",
        "--use_peft --quantization 4bit --block_size 96",
        "--max_shard_size 5",
        f"--collective_timeout {'9' * 40}h",
        "--resume auto",
        "--output_dir x --resume auto --overwrite",
        "--streaming",
        "--streaming --max_train_step 3 --validation 0.1",
    ],
)
def test_combinations_that_cannot_be_are_refused(mistakes, line: str) -> None:
    (message,) = mistakes(*line.split())
    assert message.split()[0] in line


@pytest.mark.parametrize(
    "line",
    [
        "--use_wandb --wandb_notes AKIA0123456789ABCDEF",
        "--use_wandb --wandb_tags a,b,password=hunter22",
        "--use_mlflow --mlflow_tracking_uri https://me:pw@host",
        "--use_mlflow --mlflow_tags a=b,api_key=hunter22",
        "--dataset http://me:hunter2@host/a.jsonl",
        "--dataset https://h/a.jsonl?X-Amz-Signature=hunter2",
        "--dataset [{path:https://h/a.jsonl?token=hunter2},{path:b.jsonl}]",
        "--model_name https://me:hunter2@host/model",
    ],
)
def test_a_secret_in_a_setting_is_refused_and_not_shown(mistakes, line: str) -> None:
    (message,) = mistakes(*line.split())
    assert message.startswith(f"{line.split()[-2]} has what looks like a password, a key or a signature")
    assert "hunter2" not in message and "AKIA" not in message


@pytest.mark.parametrize(
    "line",
    [
        "--validation 0.05",
        "--max_train_step 10 --warmup_steps 9",
        "--dataset a.jsonl --validation b.jsonl --early_stopping_patience 5",
        "--use_peft --init_lora_weights gaussian --use_dora --use_rslora",
        "--use_liger --activation_checkpointing selective --activation_offload",
        "--use_peft --quantization 4bit --quant_type fp4 --block_size 128 --compute_dtype float32",
        "--use_mlflow --mlflow_tracking_uri sqlite:///runs.db --mlflow_tags tokens=5000000000",
        "--dataset https://host:8080/a@v1/a.jsonl?page=2&sort=key",
        "--dataset abfs://container@account.dfs.core.windows.net/a.jsonl",
        "--use_mlflow --mlflow_experiment /Users/me@example.org/tuning --mlflow_name run-1",
    ],
)
def test_combinations_that_can_be_are_accepted(mistakes, line: str) -> None:
    assert mistakes(*line.split()) == []


def test_what_needs_a_gpu_is_refused_by_its_flag_when_auto_comes_out_as_the_cpu() -> None:
    line = "--model_name m --precision fp16 --device_memory_fraction 0.6 --enable_fsdp --fsdp_cpu_offload"
    config, places = load(line.split(), paths=False)
    check_device(config, places, "cuda")
    with pytest.raises(UserError) as refused:
        check_device(config, places, "cpu")
    flags = [message.split()[0] for message in refused.value.messages]
    assert flags == ["--precision", "--fsdp_cpu_offload", "--device_memory_fraction"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("200 mb", 2 * 10**8), ("1.5KB", 1500), ("2TB", 2 * 10**12), ("24GiB", 24 * 2**30), ("7B", 7)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size
