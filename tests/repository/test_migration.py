"""Coming from another trainer: llama-recipes' flags are answered, and the pages name settings that
exist."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import Page

from llama_ft.config import load
from llama_ft.config.reading.load import convert
from llama_ft.config.wording.messages import explain_unknown, format_value, known
from llama_ft.config.wording.other_names import EXPORTING, SAME_AS, SAME_VALUES, WITHOUT_COUNTERPART
from llama_ft.errors import UserError

LLAMA_RECIPES_PAGE = "docs/migrate/llama-recipes.md"
# The fields of llama-recipes' configurations with their defaults, from src/llama_recipes/configs of
# its repository (meta-llama/llama-recipes, later llama-cookbook).
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

each_page = pytest.mark.parametrize(
    "page",
    [
        LLAMA_RECIPES_PAGE,
        "docs/migrate/torchtune.md",
        "docs/migrate/trl.md",
        "docs/migrate/axolotl.md",
    ],
)


class Row(NamedTuple):
    """A row of a table: names or flags, each with the default in brackets, or ""."""

    theirs: list[tuple[str, str]]
    here: list[tuple[str, str]]


def entries(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`([^`]+)`(?: \(([^)]*)\))?", cell)


@functools.cache
def table(page: str) -> list[Row]:
    """The rows of a page's tables, without their heads."""
    rows = []
    for theirs, here in re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", Page(page).text, re.MULTILINE):
        same = re.fullmatch(r"same(?: \((.*)\))?", here)
        rows.append(
            Row(
                entries(theirs),
                [(name, same[1] or "") for name, _ in entries(theirs)] if same else entries(here),
            )
        )
    return rows


def value_of(text: str) -> object:
    """False is off, and 1e-4 is 0.0001."""
    text = {"false": "off", "true": "on"}.get(text.lower(), text.lower()).strip("[]")
    return float(text) if re.fullmatch(r"[\d.]+(e-?\d+)?", text) else text


@each_page
def test_a_page_names_only_settings_and_values_that_exist_with_their_defaults(page: str) -> None:
    for entry, default in [
        entry_and_default for row in table(page) for entry_and_default in row.here
    ]:
        flag, _, value = entry.removeprefix("--").partition(" ")
        assert (setting := known(flag)) is not None, entry
        assert not convert({setting.name: value or setting.default}, {})[1], entry
        assert not default or value_of(default) == value_of(format_value(setting.default)), entry


@pytest.mark.parametrize("config", LLAMA_RECIPES)
def test_every_field_of_llama_recipes_is_accepted_or_rejected_with_a_replacement(
    config: str,
) -> None:
    defaults_on_page = {
        name: default for row in table(LLAMA_RECIPES_PAGE) for name, default in row.theirs
    }
    for field in LLAMA_RECIPES[config].split():
        name, _, default = field.partition("=")
        for flag in (
            f"{config}.{name}",
            *([name] if config.endswith("config") and name != "mode" else []),
        ):
            assert known(flag) or re.search("llama-recipes|docs/migrate", explain_unknown(flag)), (
                flag
            )
        name_on_page = next(
            (form for form in (f"{config}.{name}", name) if form in defaults_on_page), None
        )
        if name_on_page is None:
            assert (
                config.endswith("_dataset") and f"`{config}.`" in Page(LLAMA_RECIPES_PAGE).text
            ), f"{config}.{name}"
        elif default:
            assert defaults_on_page[name_on_page] == default, f"{config}.{name}"


@each_page
def test_a_page_has_the_other_command_and_its_equivalent(page: str) -> None:
    shown = Page(page)
    assert re.search(r"^```(shell|yaml)$", shown.text, re.MULTILINE) is not None
    [ours] = [found[1] for command in shown.commands() if (found := command.script())]
    assert load(ours, paths=False)[0].peft.use_peft


def test_names_of_other_frameworks_map_to_existing_flags_and_values() -> None:
    page = "docs/migrate/other-frameworks.md"
    names = {
        name for row in table(page) for entry, _ in row.theirs for name in re.findall(r"\w+", entry)
    }
    assert names >= set(
        "sync_module_states param_init_fn device_id auto_wrap_policy use_orig_params limit_all_gathers fsdp_devices "
        "cpu_ram_efficient_loading precision true XLA_PYTHON_CLIENT_MEM_FRACTION CUDA_VISIBLE_DEVICES".split()
    )
    ours = [
        entry.removeprefix("--")
        for row in table(page)
        for entry, _ in row.here
        if entry.startswith("--")
    ]
    values = [entry.partition(" ")[::2] for entry in ours if not entry.startswith("nproc")]
    assert len(values) > 30
    for flag, value in values:
        assert (setting := known(flag)) is not None, flag
        assert not value or not convert({setting.name: value}, {})[1], (flag, value)


OTHER_PAGES = ("docs/migrate/trl.md", "docs/migrate/axolotl.md", "docs/migrate/torchtune.md")


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_messages_and_pages_translate_each_name_alike(page: str) -> None:
    """Each name of a table has the same translation in an error message, or none in both."""
    for row in table(page):
        here = {known_name(entry) for entry, _ in row.here}
        for theirs, _ in row.theirs:
            if known(theirs) is not None or theirs in EXPORTING:
                continue
            if here and theirs != "deepspeed":  # in TRL's table it is a file of its own
                assert theirs in SAME_AS, theirs
                parts = {known_name(part) for part in SAME_AS[theirs].split(" and ")}
                assert parts <= here or theirs in ("dtype", "eval_strategy", "save_strategy"), (
                    theirs
                )
            elif not here and theirs != "deepspeed":
                assert theirs in WITHOUT_COUNTERPART, theirs


def known_name(entry: str) -> str:
    """The setting of `--lr` or `quantization 4bit`."""
    setting = known(entry.removeprefix("--").partition(" ")[0])
    assert setting is not None, entry
    return setting.name


def test_a_name_of_another_trainer_leads_to_a_setting_that_exists() -> None:
    pairs = [(theirs, part) for theirs, ours in SAME_AS.items() for part in ours.split(" and ")]
    for theirs, part in pairs:
        assert known(theirs) is None, f"{theirs} is a setting here"
        name, _, value = part.partition(" ")
        setting = known(name)
        assert setting is not None, part
        assert not convert({setting.name: value or setting.default}, {})[1], part
        assert setting.flag in explain_unknown(theirs)


def test_a_value_of_another_trainer_leads_to_one_that_exists() -> None:
    for (setting, theirs), ours in SAME_VALUES.items():
        assert not convert({setting: ours}, {})[1]
        rejected = convert({setting: theirs}, {})[1]
        assert rejected[setting].endswith(f" Did you mean {ours}?")


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("packing", "--batching_strategy packing"),
        ("base_model", "--model_name"),
        ("val_set_size", "--validation"),
        ("max_grad_norm", "--gradient_clipping and --gradient_clipping_threshold"),
        ("lora_target_linear", "--target_modules"),
        ("sequence_length", None),  # not --context_length by letters, and not another name
        ("trackng", None),  # a section is no flag
        ("warmup_step", "--warmup_steps"),
        ("gradient_acumulation_steps", "--gradient_accumulation_steps"),
        ("accumulation_steps", "--gradient_accumulation_steps"),
        ("learning_rte", "--lr"),
        ("savemodel", "--save_model"),
        ("use_pfet", "--use_peft"),
        ("base_modle", "--model_name"),
        ("model_size", None),
        ("max_tokens", None),
        ("eval_set_size", "--validation"),  # axolotl's val_set_size, misspelled
    ],
)
def test_only_a_misspelling_or_a_known_name_gets_a_suggestion(
    typed: str, suggested: str | None
) -> None:
    said = explain_unknown(typed)
    if suggested is None:
        assert "Did you mean" not in said, said
    else:
        assert f" is not a flag. Did you mean {suggested}?" in said


def test_keys_in_sections_of_other_trainers_are_translated(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(
        "base_model: a\nfsdp_config:\n  offload_params: true\n  state_dict_type: x\n"
        "optimizer:\n  lr: 1\n  _component_: torch.optim.AdamW\nprofiler:\n  enabled: true\n"
    )
    with pytest.raises(UserError) as raised:
        load(["--config", str(file)], paths=False)
    said = "\n".join(raised.value.messages)
    assert ":1: base_model is not a setting. Did you mean model.model_name?" in said
    assert ":3: fsdp_config.offload_params is not a setting. Did you mean fsdp.fsdp_cpu_off" in said
    assert ":4: fsdp_config.state_dict_type is not a setting. It has no counterpart here" in said
    assert "optimizer is not a section. Its settings belong to train." in said
    assert "optimizer._component_ is not a setting. Did you mean train.optimizer?" in said
    assert "profiler.enabled is not a setting. Did you mean profile.use_profiler?" in said
