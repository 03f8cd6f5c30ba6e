"""The configuration on its way out, the JSON schema, and the configs in configs/ that it serves."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llama_ft.config import Config, differences, load, to_yaml
from llama_ft.config.reading.dump import json_schema
from llama_ft.config.settings.settings import SETTINGS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONFIG_FILES = sorted(CONFIGS.glob("*.yaml"))


class EditorLoader(yaml.SafeLoader):
    """YAML 1.2, as editors read it: 1e-4 is a number, and off is a word."""


EditorLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|false)$"), list("tf")
)
EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?\d*(\.\d+([eE][-+]?\d+)?|\d[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def as_editors_read(text: str) -> Any:
    return yaml.load(text, Loader=EditorLoader)  # a SafeLoader


def is_valid(text: str) -> bool:
    return jsonschema.Draft202012Validator(json_schema()).is_valid(as_editors_read(text))


def test_the_written_schema_is_current() -> None:
    written = json.loads((CONFIGS / "schema.json").read_text())
    assert written == json_schema(), "run: python docs/generate.py"


def test_every_setting_has_a_meaning_and_its_name_is_unique() -> None:
    assert all(setting.meaning for setting in SETTINGS.values())
    fields = sum(
        len(section.__dataclass_fields__)
        for section in vars(Config()).values()
        if hasattr(section, "__dict__")
    )
    assert len(SETTINGS) == fields


@pytest.mark.parametrize("file", CONFIG_FILES, ids=lambda file: file.name)
def test_every_config_names_the_schema_matches_it_and_loads(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(as_editors_read(text), json_schema())
    load([f"--config={file}"], paths=False)


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("quantization: 8bit", True),
        ("quantization: {mode: 4bit}", True),
        ("data: {validation: 0.05}", True),
        ("train: {lr: 1e-4, activation_checkpointing: off}", True),
        ("lr: 1", False),
        ("train: {lrr: 1}", False),
        ("train: {precision: bf61}", False),
        ("data: {validation: 5}", False),
    ],
)
def test_the_schema_accepts_what_the_loader_accepts(text: str, takes: bool) -> None:
    assert is_valid(text) == takes


LINES = [
    "",
    "--use_peft --r 4 --target_modules all-linear --lr 3e-6 --validation 0.05 --use_wandb --wandb_tags a,b",
    "--use_peft --target_modules q_proj,v_proj --modules_to_save lm_head --wandb_name 1e5 --use_wandb",
    "--enable_fsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 2 --precision fp32",
    "--lr_scheduler step --gamma 0.5 --output_dir somewhere --overwrite --no_run_validation",
    "--use_peft --from_peft_checkpoint folder --context_length 99",
]


@pytest.mark.parametrize("line", LINES)
def test_the_written_config_loads_with_the_same_values(line: str, tmp_path: Path) -> None:
    config, _ = load(line.split(), paths=False)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config, "llama_ft 0.1\nwritten by a test"))
    again, places = load([f"--config={file}"], paths=False)
    one_run_only = ("checkpoint.output_dir", "checkpoint.overwrite")
    assert differences(again) == [
        line for line in differences(config) if not line.startswith(one_run_only)
    ]
    assert len(places) == len(SETTINGS) - 4
    assert all(place.startswith(str(file)) for place in places.values())
