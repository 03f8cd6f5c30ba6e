"""Settings of a run: declared in `settings.py`, `data_settings.py` and `output_settings.py`, read
from YAML and the command line, and checked.

Nothing here imports torch, so `--help` and errors appear within a second.
"""

from llama_ft.config.objectives import OBJECTIVES, PreferenceConfig
from llama_ft.config.paths import base_model_of, replaced_entries, run_entries
from llama_ft.config.reading.dump import differences, to_yaml
from llama_ft.config.reading.load import check_command_line, load, load_flags, with_present_names
from llama_ft.config.rules import as_fraction, check_device, needs_first_pass
from llama_ft.config.settings.data_settings import DataConfig
from llama_ft.config.settings.output_settings import (
    CheckpointConfig,
    MemoryConfig,
    ProfileConfig,
    TrackingConfig,
)
from llama_ft.config.settings.settings import (
    Config,
    FSDPConfig,
    ModelConfig,
    PeftConfig,
    QuantizationConfig,
    TrainConfig,
    values_of,
)
from llama_ft.config.value_types import parse_duration, parse_size
