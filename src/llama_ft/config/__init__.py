"""Settings of a run: declared in `sections.py`, read from a YAML recipe and the command line, checked all at once.

Nothing here imports torch: `--help` and every mistake answer within a second.
"""

from llama_ft.config.command_line import exit_with, parse_command_line
from llama_ft.config.help import help_text
from llama_ft.config.load import load, load_recipe
from llama_ft.config.output_dir import model_dir_complaint, run_entries
from llama_ft.config.paths import adapter_complaint, base_model_of, model_complaint
from llama_ft.config.resolved import differences, to_yaml
from llama_ft.config.rules import as_fraction, check_device, check_rules, parse_duration, parse_size
from llama_ft.config.same_run import check_same_run
from llama_ft.config.script_flags import ScriptFlags
from llama_ft.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    FSDPConfig,
    MemoryConfig,
    ModelConfig,
    PeftConfig,
    ProfileConfig,
    QuantizationConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "FSDPConfig",
    "MemoryConfig",
    "ModelConfig",
    "PeftConfig",
    "ProfileConfig",
    "QuantizationConfig",
    "ScriptFlags",
    "TrackingConfig",
    "TrainConfig",
    "adapter_complaint",
    "as_fraction",
    "base_model_of",
    "check_device",
    "check_rules",
    "check_same_run",
    "differences",
    "exit_with",
    "help_text",
    "load",
    "load_recipe",
    "model_complaint",
    "model_dir_complaint",
    "parse_command_line",
    "parse_duration",
    "parse_size",
    "run_entries",
    "to_yaml",
]
