"""Rules over several settings."""

import pytest

from llama_ft.config import (
    Config,
    DataConfig,
    ModelConfig,
    PeftConfig,
    TrainConfig,
    check_device,
    check_rules,
    load,
    parse_size,
)
from llama_ft.errors import UserError


def test_pure_bf16_is_built(mistakes) -> None:
    assert mistakes("--precision", "bf16_pure") == []


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("--warmup_steps 10 --max_train_step 10", "--warmup_steps is 10, but training ends after 10 steps"),
        ("--validation 1.5", "--validation is 1.5; a fraction lies between 0 and 1"),
        ("--validation 0", "--validation is 0; a fraction"),
        ("--dataset a.jsonl --eval_steps 5", "--eval_steps has no effect without validation data."),
        ("--dataset a.jsonl --early_stopping_patience 5", "--early_stopping_patience has no effect without validation"),
        ("--use_peft --init_lora_weights pissa", "--init_lora_weights is pissa, which needs whole weights"),
        ("--use_peft --init_lora_weights olora", "--init_lora_weights is olora, which needs whole weights"),
        (
            "--use_wandb --wandb_notes AKIA0123456789ABCDEF",
            "--wandb_notes has what looks like a key or a password",
        ),
        (
            "--use_wandb --wandb_project password=hunter22",
            "--wandb_project has what looks like a key or a password",
        ),
        (
            "--use_wandb --wandb_project a/password=hunter22",
            "--wandb_project has what looks like a key",
        ),
        (
            "--use_wandb --wandb_entity password=hunter22",
            "--wandb_entity has what looks like a key or a password",
        ),
        (
            "--use_wandb --wandb_job_type password=hunter22",
            "--wandb_job_type has what looks like a key or a",
        ),
        (
            "--use_mlflow --mlflow_experiment password=hunter22",
            "--mlflow_experiment has what looks like a key or",
        ),
        (
            "--use_mlflow --mlflow_name password=hunter22",
            "--mlflow_name has what looks like a key or a password",
        ),
        ("--use_wandb --wandb_tags a,b,password=hunter22", "--wandb_tags has what looks like a key or a password"),
        ("--use_wandb --wandb_notes https://me:hunter2@host", "--wandb_notes has a password, key or signature in its"),
        (
            "--use_mlflow --mlflow_tracking_uri https://me:pw@host",
            "--mlflow_tracking_uri has a password or a key in its",
        ),
        (
            "--use_mlflow --mlflow_tracking_uri https://h/?token=hunter2",
            "--mlflow_tracking_uri has a password or a key in",
        ),
        ("--use_mlflow --mlflow_tags a=b,api_key=hunter22", "--mlflow_tags has what looks like a key or a password"),
        ("--dataset http://me:hunter2@host/a.jsonl", "--dataset has a password, key or signature in its URL"),
        ("--dataset https://hunter2@host/a.jsonl", "--dataset has a password, key or signature in its URL"),
        ("--dataset https://h/a.jsonl?X-Amz-Signature=hunter2", "--dataset has a password, key or signature in its"),
        ("--dataset https://h/a.jsonl?x=1&sig=hunter2", "--dataset has a password, key or signature in its URL"),
        ("--validation https://h/a.jsonl?X%2DGoog%2DSignature=hunter2", "--validation has a password, key or"),
        ("--dataset [{path:https://h/a.jsonl?token=hunter2},{path:b.jsonl}]", "--dataset has a password, key or"),
        ("--model_name https://me:hunter2@host/model", "--model_name has a password, key or signature in its URL"),
        ("--use_peft --target_modules []", "--target_modules names no layer."),
        (
            "--use_peft --target_modules q_proj,lm_head --modules_to_save lm_head",
            "--modules_to_save is lm_head, and target_modules names",
        ),
        ("--attn_implementation flash_attention_2 --device cpu", "--attn_implementation is flash_attention_2, which"),
        ("--attn_implementation flash_attention_3 --precision fp32", "--attn_implementation is flash_attention_3, "),
        ("--precision fp16 --device cpu", "--precision is fp16, which is for GPUs without bf16. Use bf16_mixed or "),
        ("--use_liger --device cpu", "--use_liger needs CUDA"),
        (
            "--activation_checkpointing full --activation_offload --device cpu",
            "--activation_offload needs CUDA",
        ),
        ("--use_profiler --max_train_step 5", "--use_profiler profiles up to step 6, and max_train_step is 5. Use 6."),
        ("--flop_counter --max_train_step 2", "profile.flop_counter_start is 3; training ends after 2 steps"),
        (
            "--compile --device cpu",
            "--compile needs CUDA",
        ),
        ("--compile --use_liger", "--compile cannot be combined with use_liger"),
        (
            "--compile --activation_checkpointing full --activation_offload",
            "--compile cannot be combined with activation_offload",
        ),
        (
            "--compile --precision fp32",
            "--compile with precision fp32 needs padding",
        ),
        (
            "--activation_checkpointing auto --no_plan",
            "--activation_checkpointing is auto, which needs the plan",
        ),
        ("--memory_snapshot --device cpu", "--memory_snapshot needs CUDA"),
        (
            "--enable_fsdp --fsdp_wrap_policy size --activation_checkpointing selective",
            "--activation_checkpointing is selective, for which layers must be FSDP units.",
        ),
        ("--quantization", "--quantization is 8bit, and quantized weights cannot be trained. Add use_peft"),
        ("--use_peft --use_dora --quantization 4bit", "--use_dora needs the weights themselves at every step"),
        ("--use_peft --quantization 4bit --block_size 96", "--block_size is 96; bitsandbytes has 32, 64, 128,"),
        ("--max_shard_size 5", "--max_shard_size is 5; expected a size such as 5GB or 200MB."),
        (f"--collective_timeout {'9' * 40}h", "--collective_timeout is 999999"),
        ("--stop_after 367d", "--stop_after is 367d; expected a time of up to a year, such as"),
        ("--max_shard_size 0GB", "--max_shard_size is 0GB; expected a size"),
    ],
)
def test_combinations_that_cannot_be_are_refused(mistakes, line: str, start: str) -> None:
    (message,) = mistakes(*line.split())
    assert message.startswith(start)


@pytest.mark.parametrize(
    "line",
    [
        "--warmup_steps 10 --max_train_step 11",
        "--warmup_steps 10",
        "--validation 0.05",
        "--dataset a.jsonl --validation b.jsonl --eval_steps 5",
        "--dataset demo --early_stopping_patience 5",
        "--use_peft --init_lora_weights gaussian --use_dora --use_rslora",
        "--attn_implementation flash_attention_2 --device cuda",
        "--use_liger --activation_checkpointing selective --activation_offload",
        "--use_peft --quantization 4bit --quant_type fp4 --block_size 128 --compute_dtype float32",
        "--use_peft --quantization --int8_threshold 0 --skip_modules lm_head,down_proj",
        "--compile --precision fp32 --batching_strategy padding",
        "--compile --activation_checkpointing selective --use_peft --quantization 4bit",
        "--activation_checkpointing auto --activation_offload",
        "--max_shard_size 1.5GB",
        "--max_shard_size 10KB",
        "--use_mlflow --mlflow_tracking_uri runs/mlflow --mlflow_tags team=a=b,c=",
        "--use_mlflow --mlflow_tracking_uri sqlite:///runs.db --mlflow_tags tokens=5000000000",
        "--dataset https://host:8080/a@v1/a.jsonl?page=2&sort=key",
        "--dataset abfs://container@account.dfs.core.windows.net/a.jsonl",
        "--use_mlflow --mlflow_tracking_uri https://mlflow.example.org:5000/path",
        "--use_mlflow --mlflow_experiment /Users/me@example.org/tuning --mlflow_name run-1",
    ],
)
def test_combinations_that_can_be_are_accepted(mistakes, line: str) -> None:
    assert mistakes(*line.split()) == []


def test_a_configuration_built_in_python_is_checked_too() -> None:
    config = Config(
        model=ModelConfig(compile=True, use_liger=True),
        train=TrainConfig(warmup_steps=5, max_train_step=5, gamma=0.5),
        peft=PeftConfig(r=4),
        data=DataConfig(validation="2"),
    )
    assert check_rules(config) == [
        "train.warmup_steps is 5, but training ends after 5 steps (max_train_step): lower --warmup_steps.",
        "data.validation is 2; a fraction lies between 0 and 1, such as 0.05.",
        "model.compile cannot be combined with use_liger: both fuse the same operations. Remove one.",
        "train.gamma has no effect unless lr_scheduler is step.",
        "peft.r has no effect without use_peft.",
    ]


def test_what_needs_a_gpu_is_refused_by_its_flag_when_auto_comes_out_as_the_cpu() -> None:
    line = "--model_name m --precision fp16 --device_memory_fraction 0.6 --enable_fsdp --fsdp_cpu_offload"
    config, places = load(line.split(), paths=False)
    check_device(config, places, "cuda")
    with pytest.raises(UserError) as refused:
        check_device(config, places, "cpu")
    assert str(refused.value).splitlines() == [
        "error: --precision is fp16, which is for GPUs without bf16. Use bf16_mixed or fp32 on the CPU.",
        "error: --fsdp_cpu_offload has no effect on the CPU: parameters and optimizer are in host memory already.",
        "error: --device_memory_fraction has no effect on the CPU: it limits GPUs.",
    ]


def test_the_defaults_break_no_rule() -> None:
    assert check_rules(Config()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("200 mb", 2 * 10**8), ("1.5KB", 1500), ("2TB", 2 * 10**12), ("24GiB", 24 * 2**30), ("7B", 7)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size
