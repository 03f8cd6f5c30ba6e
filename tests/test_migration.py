"""Coming from another trainer: the pages, the answers to foreign names and the settings say the same."""

import dataclasses
import functools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import REPOSITORY
from pages import Page
from transformers import TrainingArguments

from llama_ft.config import load
from llama_ft.config.fields import SETTINGS
from llama_ft.config.load import convert
from llama_ft.config.names import guess, known, told_apart
from llama_ft.config.trainers import TRAINERS, Trainer
from llama_ft.config.wording import show
from llama_ft.errors import UserError

# The fields of llama-recipes' configurations with their defaults, from src/llama_recipes/configs of its repository
# (meta-llama/llama-recipes, later llama-cookbook).
LLAMA_RECIPES = {
    "train_config": (
        "model_name=PATH/to/Model tokenizer_name=None enable_fsdp=False low_cpu_fsdp=False run_validation=True "
        "batch_size_training=4 batching_strategy=packing context_length=4096 gradient_accumulation_steps=1 "
        "gradient_clipping=False gradient_clipping_threshold=1.0 num_epochs=3 max_train_step=0 max_eval_step=0 "
        "num_workers_dataloader=1 lr=1e-4 weight_decay=0.0 gamma=0.85 seed=42 use_fp16=False mixed_precision=True "
        "val_batch_size=1 dataset=samsum_dataset peft_method=lora use_peft=False from_peft_checkpoint=empty "
        "output_dir=PATH/to/save/PEFT/model freeze_layers=False num_freeze_layers=1 freeze_LLM_only=False "
        "quantization=None one_gpu=False save_model=True dist_checkpoint_root_folder dist_checkpoint_folder=fine-tuned "
        "save_optimizer=False use_fast_kernels=False use_wandb=False save_metrics=False flop_counter=False "
        "flop_counter_start=3 use_profiler=False profiler_dir=PATH/to/save/profiler/results "
        "enable_activation_checkpointing=False activation_checkpointing_use_reentrant=False "
        "enable_memory_monitoring=False memory_monitoring_interval=100"
    ),
    "fsdp_config": (
        "mixed_precision=True use_fp16=False sharding_strategy=FULL_SHARD hsdp=False sharding_group_size=0 "
        "replica_group_size=0 checkpoint_type=SHARDED_STATE_DICT fsdp_activation_checkpointing=True "
        "fsdp_cpu_offload=False pure_bf16=False optimizer=AdamW"
    ),
    "lora_config": "r=8 lora_alpha=32 target_modules=q_proj,v_proj bias=none task_type=CAUSAL_LM lora_dropout=0.05 "
    "inference_mode=False",
    "llama_adapter_config": "adapter_len=10 adapter_layers=30 task_type=CAUSAL_LM",
    "prefix_config": "num_virtual_tokens=30 task_type=CAUSAL_LM",
    "quantization_config": "quant_type=fp4 compute_dtype=bfloat16 use_double_quant=False quant_storage=bfloat16",
    "wandb_config": "project=llama_recipes entity=None job_type=None tags=None group=None notes=None mode=None",
    "custom_dataset": "file train_split=train test_split=validation",
    "samsum_dataset": "train_split test_split",
    "grammar_dataset": "train_split test_split",
    "alpaca_dataset": "train_split test_split data_path",
    "llamaguard_toxicchat_dataset": "train_split test_split",
}
# TRL's SFTConfig has defaults of its own for these.
OF_TRL = {"learning_rate": "2e-05", "logging_steps": "10", "gradient_checkpointing": "True", "bf16": "None"}
TORCHTUNE_YAML = """
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj']
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4
epochs: 1
"""
AXOLOTL_YAML = "base_model: m\nload_in_8bit: true\ndatasets:\n  - path: a\n    type: alpaca\nlr_scheduler: cosine\n"
TRL_YAML = "model_name_or_path: m\ndataset_name: d\nlearning_rate: 2e-5\nuse_peft: true\n"
ACCELERATE_YAML = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"


each_trainer = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)


class Entry(NamedTuple):
    """A name or a flag of a table, with the default that is told in brackets."""

    name: str
    default: str | None


class Row(NamedTuple):
    theirs: list[Entry]
    here: list[Entry]
    same: bool


def entries(cell: str) -> list[Entry]:
    return [Entry(name, default or None) for name, default in re.findall(r"`([^`]+)`(?: \(([^)]*)\))?", cell)]


@functools.cache
def table(page: str) -> list[Row]:
    """The rows of a page's tables, without their heads."""
    rows = []
    for theirs, here in re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", Page(page).text, re.MULTILINE):
        same = re.fullmatch(r"same(?: \((.*)\))?", here)
        ours = [Entry(name, same[1]) for name, _ in entries(theirs)] if same else entries(here)
        rows.append(Row(entries(theirs), ours, same is not None))
    return rows


def setting_in(flag: str) -> tuple[str, str]:
    """The field a flag of a table is about, and its value."""
    name, _, value = flag.removeprefix("--").partition(" ")
    setting = known(name)
    assert setting is not None, flag
    return setting.name, value


def alike(one: str, other: str) -> bool:
    """Whether two texts are one value: False is off, and 1e-4 is 0.0001."""
    words = {"false": "off", "true": "on"}
    one, other = (words.get(text.lower(), text.lower()).strip("[]") for text in (one, other))
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def is_value(name: str, value: str) -> bool:
    return not convert({name: value or SETTINGS[name].default}, {})[1]


@each_trainer
def test_what_a_page_says_is_here_is_here_with_its_default(trainer: Trainer) -> None:
    for entry in [entry for row in table(trainer.page) for entry in row.here]:
        name, value = setting_in(entry.name)
        assert is_value(name, value), entry
        if entry.default is not None:
            assert alike(entry.default, show(SETTINGS[name].default)), entry


@each_trainer
def test_what_a_page_says_is_the_same_has_the_same_name_and_default(trainer: Trainer) -> None:
    same = [row for row in table(trainer.page) if row.same]
    assert same
    for theirs, ours in [pair for row in same for pair in zip(row.theirs, row.here, strict=True)]:
        setting = known(theirs.name)
        assert setting is not None, theirs
        if ours.default is None and theirs.default is not None:
            assert alike(theirs.default, show(setting.default)), theirs


@each_trainer
def test_names_of_a_page_are_answered_as_the_page_says(trainer: Trainer) -> None:
    for row in table(trainer.page):
        here = {setting_in(entry.name)[0] for entry in row.here}
        for name, _ in row.theirs:
            setting, said = known(name), told_apart(name)
            if not here:
                assert setting is None and (said is None or "is not used here" in said), f"{name}: {said}"
            elif setting:
                assert setting.name in here, name
            elif said:
                meant = guess(name)
                named = {meant.setting.name} if meant else set(re.findall(r"\w+", said))
                assert named & here, f"{name}: the page says {here}, the program {said}"


@each_trainer
def test_every_name_of_a_page_is_accepted_or_answered_as_that_trainers(trainer: Trainer) -> None:
    for name in [entry.name for row in table(trainer.page) for entry in row.theirs]:
        assert known(name) or trainer.name in (told_apart(name) or "").partition("; here")[0], name


@each_trainer
def test_every_answer_is_on_the_page_of_its_trainer(trainer: Trainer) -> None:
    rows = {entry.name: row for row in table(trainer.page) for entry in row.theirs}
    for name, answer in trainer.names.items():
        assert known(name) is None, f"{name} is a setting"
        assert name in rows, f"{name} is not on {trainer.page}"
        setting_name, _, value = answer.partition(" ")
        setting = known(setting_name)
        if setting and " " not in value:
            assert is_value(setting.name, value), answer
            flags = [setting_in(entry.name) for entry in rows[name].here]
            assert ((setting.name, value) in flags) if value else (setting.name in dict(flags)), (name, answer, flags)


@pytest.mark.parametrize("config", LLAMA_RECIPES)
def test_every_field_of_llama_recipes_is_accepted_or_refused_with_what_to_use(config: str) -> None:
    page = table(TRAINERS[0].page)
    told = {entry.name: entry.default for row in page for entry in row.theirs}
    for field in LLAMA_RECIPES[config].split():
        name, _, default = field.partition("=")
        for flag in (f"{config}.{name}", *([name] if config.endswith("config") and name != "mode" else [])):
            assert known(flag) or told_apart(flag), flag
        told_as = next((form for form in (f"{config}.{name}", name) if form in told), None)
        if told_as is None:
            assert config.endswith("_dataset") and f"`{config}.`" in Page(TRAINERS[0].page).text, f"{config}.{name}"
        elif default:
            assert told[told_as] == default, f"{config}.{name}"


def test_every_argument_of_transformers_is_on_trls_page_with_its_default() -> None:
    told = {entry.name: entry.default for row in table(TRAINERS[2].page) for entry in row.theirs}
    for field in dataclasses.fields(TrainingArguments):
        if not field.name.startswith("_"):
            default = field.default_factory() if callable(field.default_factory) else field.default
            shown = "empty" if default == "" else str(default)
            assert told.get(field.name, "missing") == OF_TRL.get(field.name, shown), field.name


@each_trainer
def test_a_page_has_their_command_and_the_same_here(trainer: Trainer) -> None:
    page = Page(trainer.page)
    theirs = re.search(r"^```(shell|yaml)$", page.text, re.MULTILINE)
    assert theirs is not None
    [ours] = [found[1] for command in page.commands() if (found := command.script())]
    assert load(ours, paths=False)[0].peft.use_peft


@pytest.mark.parametrize(
    ("text", "whose", "page"),
    [
        (TORCHTUNE_YAML, "torchtune", "docs/from-torchtune.md"),
        (AXOLOTL_YAML, "axolotl", "docs/from-axolotl.md"),
        (TRL_YAML, "TRL", "docs/from-trl.md"),
        (ACCELERATE_YAML, "accelerate", "docs/from-trl.md"),
    ],
)
def test_a_whole_recipe_of_another_trainer_is_one_mistake(tmp_path: Path, text: str, whose: str, page: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        load(["--config", str(file), "--enable_fsdp"], paths=False)
    [message] = refusal.value.messages
    assert f"this is a recipe for {whose}" in message
    assert page in message and (REPOSITORY / page).is_file()


def test_one_foreign_key_in_a_recipe_of_ours_is_answered_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_model: m\ntrain:\n  micro_batch_size: 2\npeft:\n  lora_rank: 4\n")
    with pytest.raises(UserError) as refusal:
        load(["--config", str(file)], paths=False)
    ends = [message.partition("yaml:")[2] for message in refusal.value.messages]
    assert ends == [
        "1: base_model is axolotl's name; here it is model.model_name.",
        "3: train.micro_batch_size is axolotl's name; here it is train.batch_size_training.",
        "5: peft.lora_rank is torchtune's name; here it is peft.r.",
    ]


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--per_device_train_batch_size 2", "is TRL's name; here it is --batch_size_training."),
        ("--num_train_epochs 2", "is TRL's name; here it is --num_epochs."),
        ("--sequence_len 2", "is axolotl's name; here it is --context_length."),
        ("--train.gradient_checkpointing", "is TRL's and axolotl's name; here it is --activation_checkpointing full."),
        ("--fsdp_config.fsdp_offload_params true", "is TRL's and axolotl's name; here it is --fsdp_cpu_offload."),
        ("--model.lora_attn_modules q_proj", "is torchtune's name; here it is --target_modules."),
        ("--packing false", "is TRL's name; here it is --batching_strategy padding."),
        ("--packed=False", "is torchtune's name; here it is --batching_strategy padding."),
        ("--no_packing", "is TRL's name; here it is --batching_strategy padding."),
        ("--load_in_8bit false", "is TRL's and axolotl's name; for false leave it out."),
        ("--no_gradient_checkpointing", "is TRL's and axolotl's name; for false leave it out."),
        ("--train_on_inputs no", "is axolotl's name; for no leave it out."),
        ("--bf16 false", "is TRL's and axolotl's name; here it is --precision fp32."),
        ("--assistant_only_loss false", "is TRL's name; here it is --labels all."),
        ("--hsdp False", "is llama-recipes' name; for False leave it out."),
        ("--fsdp_reshard_after_forward false", ", known from torchtune, is not used here: use sharding_strategy "
                                               "FULL_SHARD for true, SHARD_GRAD_OP for false."),
        ("--torch_compile false", "is TRL's and axolotl's name; here it is --compile."),
        ("--local_rank 0", ", known from TRL, is not used here: nothing takes its place, as docs/from-trl.md says. "
                           "Leave it out."),
        ("--tf32 false", ", known from TRL and axolotl, is not used here: nothing takes its place, as docs/from-trl.md "
                         "says. Leave it out."),
        ("--report_to wandb", ", known from TRL, is not used here: use_wandb, use_tensorboard and use_mlflow say where "
                              "to; output_dir/metrics.jsonl is always written."),
        ("--enable_activation_checkpointing", "is llama-recipes' and torchtune's name; here it is "
                                              "--activation_checkpointing full."),
    ],
)  # fmt: skip
def test_a_flag_of_another_trainer_is_answered_with_ours(flags: str, answer: str) -> None:
    with pytest.raises(UserError) as refusal:
        load(shlex.split(flags), paths=False)
    [message] = refusal.value.messages
    flag = flags.split()[0].partition("=")[0]
    assert message in (f"{flag} {answer}", f"{flag}{answer}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("packing: false", "packing is TRL's name; here it is data.batching_strategy: padding."),
        ("train:\n  load_in_4bit: off", "train.load_in_4bit is TRL's and axolotl's name; for off leave it out."),
        ("fsdp_config:\n  hsdp: true", "fsdp_config is not a section. Did you mean fsdp?"),
    ],
)
def test_a_false_of_another_trainer_in_a_recipe_is_not_answered_with_true(
    tmp_path: Path, text: str, answer: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        load(["--config", str(file)], paths=False)
    [message] = refusal.value.messages
    assert message.endswith(f": {answer}")


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ("--attn_implementation None", "Leave it out for auto."),
        ("--optimizer adamw_torch_fused", "Did you mean AdamW?"),
        ("model.lora_alpha=16", "Did you mean --lora_alpha 16?"),
    ],
)
def test_a_value_of_another_trainer_is_answered_with_ours(flags: str, end: str) -> None:
    with pytest.raises(UserError) as refusal:
        load(flags.split(), paths=False)
    assert refusal.value.messages[0].endswith(end)


def test_a_deepspeed_file_is_one_mistake_that_names_fsdp(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage": 3}\n}\n')
    with pytest.raises(UserError) as refusal:
        load(["--config", str(file)], paths=False)
    [message] = refusal.value.messages
    assert ":3: zero_optimization tells that this is a configuration for DeepSpeed" in message
    assert "--enable_fsdp" in message
