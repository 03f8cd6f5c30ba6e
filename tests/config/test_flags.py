"""The command line: what is accepted, and what fire would have let through."""

import shlex
from pathlib import Path

import pytest

from llama_ft.config import Config, load
from llama_ft.errors import UserError


def parsed(line: str) -> Config:
    return load(shlex.split(line), paths=False)[0]


@pytest.mark.parametrize(
    "line",
    ["--lr 1e-3", "--lr=1e-3", "--train.lr 1e-3", "--train.lr=0.001", "--train_config.lr 1e-3"],
)
def test_a_setting_has_a_plain_and_a_dotted_flag_with_or_without_equals(line: str) -> None:
    assert parsed(line).train.lr == 0.001


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--use_peft", True),
        ("--use_peft True", True),
        ("--use_peft 1", True),
        ("--use_peft=yes", True),
        ("--use_peft False", False),
        ("--use_peft=off", False),
        ("--no_use_peft", False),
        ("--nouse_peft", False),
        ("--no-use-peft", False),
        ("--no_peft.use_peft", False),
    ],
)
def test_a_switch_is_turned_on_and_off_in_every_spelling(line: str, value: bool) -> None:
    assert parsed(line).peft.use_peft is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("all-linear", "all-linear"),
        ("q_proj", ["q_proj"]),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        (r".*\.[0-9]{1,2}\.q_proj", r".*\.[0-9]{1,2}\.q_proj"),
        ("q_proj,k_proj", ["q_proj", "k_proj"]),
        ("[q_proj, k_proj]", ["q_proj", "k_proj"]),
        ("['q_proj','k_proj']", ["q_proj", "k_proj"]),
    ],
)
def test_lists_are_written_with_commas_and_patterns_stay_text(text: str, value: object) -> None:
    assert (
        load(["--use_peft", f"--target_modules={text}"], paths=False)[0].peft.target_modules
        == value
    )


def test_quoted_texts_of_a_list_keep_their_commas() -> None:
    quoted = """["Hello, you", 'b: c?', "it's"]"""
    for text, value in {quoted: ["Hello, you", "b: c?", "it's"], "[a*, *b]": ["a*", "*b"]}.items():
        assert (
            load(["--sample_tokens=8", f"--sample_prompts={text}"], paths=False)[
                0
            ].train.sample_prompts
            == value
        )


def test_datasets_with_commas_between_them_are_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("a.jsonl,b.jsonl", "a.jsonl, b.jsonl", "[a.jsonl,b.jsonl]"):
        config = load([f"--dataset={text}"], paths=False)[0]
        assert config.data.dataset == [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    for name in ("a,b.jsonl", "https://host/x,y.jsonl", "a.jsonl,"):
        if "/" not in name and not name.endswith(","):
            (tmp_path / name).touch()
        assert load([f"--dataset={name}"], paths=False)[0].data.dataset == name
    two = load(["--dataset=s3://b/x.jsonl,s3://b/y.jsonl"], paths=False)[0]
    assert two.data.dataset == [{"path": "s3://b/x.jsonl"}, {"path": "s3://b/y.jsonl"}]


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_none_unsets_an_optional_setting(word: str) -> None:
    assert parsed(f"--context_length {word}").data.context_length is None


def test_values_reach_settings_as_typed_and_not_as_python_literals() -> None:
    config = parsed("--use_wandb --wandb_name 1e5 --wandb_project 007 --wandb_tags 1,0x10")
    assert (config.tracking.wandb_name, config.tracking.wandb_project) == ("1e5", "007")
    assert config.tracking.wandb_tags == ["1", "0x10"]


def test_llama_recipes_prefixes_name_the_same_settings() -> None:
    config = parsed(
        "--use_peft --lora_config.r 3 --enable_fsdp --fsdp_config.sharding_strategy SHARD_GRAD_OP --use_wandb "
        "--wandb_config.project mine"
    )
    assert config.peft.r == 3
    assert config.fsdp.sharding_strategy == "SHARD_GRAD_OP"
    assert config.tracking.wandb_project == "mine"


def test_a_negative_number_is_a_value(errors_of) -> None:
    assert errors_of("--lr", "-1", "--seed", "-3") == [
        "--lr -1: must be greater than 0.",
        "--seed -3: must be at least 0.",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--lrr 1e-4", "--lrr is not a flag. Did you mean --lr?"),
        ("--learning-rate 1e-4", "--learning-rate is not a flag. Did you mean --lr? docs/migrate"),
        ("--model x", "Did you mean --model_name?"),
        ("--lora", "Did you mean --use_peft?"),
        ("--use_lora", "Did you mean --use_peft?"),
        ("--use_qlora", "Did you mean --quantization 4bit?"),
        ("--optim adamw_torch", "Did you mean --optimizer?"),
        ("--micro_batch_size 2", "Did you mean --batch_size_training?"),
        ("--dataset_name x", "Did you mean --dataset?"),
        ("--lora_rank 4", "--lora_rank is not a flag. Did you mean --peft.r? docs/migrate"),
        ("--lora_r 4", "Did you mean --peft.r?"),
        ("--bf16", "Did you mean --precision bf16_mixed?"),
        ("--fp16", "Did you mean --precision fp16?"),
        ("--nproc 2", "torchrun --nproc_per_node 2 recipes/finetuning.py"),
        ("--load_in_8bit", "Did you mean --quantization 8bit?"),
        ("--pure_bf16", "Did you mean --precision bf16_pure? docs/migrate"),
        ("--fsdp_config.hsdp", "Did you mean --sharding_strategy HYBRID_SHARD?"),
        ("--confg x.yaml", "Did you mean --config?"),
        ("--zzzzzz", "--zzzzzz is not a flag. --help all lists them, and docs/migrate"),
        ("--lr --use_peft", "--lr needs a value."),
        ("--model_name=", "--model_name: the value is empty."),
        ("--use_peft --target_modules=", "--target_modules: the value is empty."),
        ("--config", "--config needs a value."),
        ("--config=", "--config: the value is empty."),
        ("--config '' --use_peft", "--config: the value is empty."),
        ("--no_lr", "--no_lr: --no_ works for switches"),
        ("mine.yaml", '"mine.yaml" is an unexpected argument.'),
        ("--use_peft --target_modules q v", "Write a list as --target_modules q,v."),
        ("Qwen/Qwen3-8B", "unexpected argument. Did you mean --model_name Qwen/Qwen3-8B?"),
        ("quickstart", "unexpected argument. Did you mean --config quickstart?"),
        ("QUICKSTART", '"QUICKSTART" is an unexpected argument. A flag takes one value'),
        ("a" * 5000, "is an unexpected argument. A flag takes one value"),
        ("help", "unexpected argument. Did you mean --help?"),
        ("--lr 1 2", '"2" is an unexpected argument. A flag takes one value'),
        (
            "--dataset a.jsonl b.jsonl c.jsonl",
            '"c.jsonl" is an unexpected argument. Write a list as --dataset a.jsonl,b.jsonl,c.jsonl.',
        ),
    ],
)
def test_each_typo_on_the_command_line_has_its_message(errors_of, line: str, expected: str) -> None:
    (message,) = errors_of(*shlex.split(line))
    assert expected in message


def test_the_last_value_of_a_repeated_flag_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--lr 1 --train.lr 2").train.lr == 2
    assert (
        capsys.readouterr().err == "warning: --train.lr is given twice; the last value is used.\n"
    )


@pytest.mark.parametrize(
    "flag", ["--one_gpu", "--train_config.one_gpu", "--custom_dataset.file mine.py"]
)
def test_an_unsupported_llama_recipes_flag_is_rejected_with_its_migration_page(
    errors_of, flag: str
) -> None:
    (message,) = errors_of(*flag.split())
    assert message.startswith(
        f"{flag.split()[0]}, known from llama-recipes, is not used here: docs/migrate/llama-"
    )


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("--quantization", "8bit"),
        ("--quantization 4bit", "4bit"),
        ("--quantization.mode 4bit", "4bit"),
        ("--quantization True", "8bit"),
        ("--quantization none", "none"),
        ("--no_quantization", "none"),
        ("--quantization False", "none"),
        ("--mode none", "none"),
    ],
)
def test_quantization_is_short_for_quantization_mode_and_means_8bit(line: str, mode: str) -> None:
    assert parsed(f"{line} --use_peft").quantization.mode == mode


@pytest.mark.parametrize("flag", ["--no_plan", "--no_plan_memory", "--plan_memory false"])
def test_the_plan_is_turned_off_by_its_earlier_name_too(flag: str) -> None:
    assert parsed("").memory.plan_memory
    assert not parsed(flag).memory.plan_memory


@pytest.mark.parametrize("name", ["label_smoothing", "dpo_label_smoothing"])
def test_the_smoothing_of_pairs_has_an_earlier_name(name: str) -> None:
    config = parsed(f"--objective dpo --{name} 0.2")
    assert config.preference.dpo_label_smoothing == 0.2


def test_a_config_may_have_earlier_names(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("memory: {no_plan: true}\npreference: {objective: dpo, label_smoothing: 0.2}\n")
    config = parsed(f"--config {file}")
    assert not config.memory.plan_memory
    assert config.preference.dpo_label_smoothing == 0.2
    file.write_text("memory: {no_plan: false}\n")
    assert parsed(f"--config {file}").memory.plan_memory
    file.write_text("memory: {no_plan: yes}\n")
    assert not parsed(f"--config {file}").memory.plan_memory
    file.write_text("memory: {plan_memory: true, no_plan: true}\n")
    with pytest.raises(UserError, match=r"old.yaml:1: memory.plan_memory is set twice"):
        parsed(f"--config {file}")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("groups", "[{match: norm, lr: 2x, lr: 3x}]", "groups[0].lr: is given more than once."),
        ("groups", '[{match: "", lr: 2x}]', "groups[0].match: must not be empty."),
        ("groups", '[{match: "(", lr: 2x}]', "groups[0].match: not a regular expression"),
        ("validation", "{a: x.jsonl, a: y.jsonl}", "validation.a: is given more than once."),
        ("options", '{exclude_modules: "("}', "options.exclude_modules: not a regular expression"),
        ("options", "{layers_to_transform: x}", "options.layers_to_transform: must be a valid"),
        ("options", "{layers_pattern: [[a]]}", "options.layers_pattern: must be a valid"),
    ],
)
def test_a_wrong_value_inside_a_flag_is_named_by_its_keys(
    flag: str, value: str, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        load(["--use_peft", f"--{flag}", value], paths=False)
    [found] = raised.value.messages
    assert message in found
