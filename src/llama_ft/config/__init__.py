"""Settings of a run: declared in `settings.py` and `run_settings.py`, read from YAML and the
command line, and checked.

Nothing here imports torch, so `--help` and errors appear within a second.
"""

from llama_ft.config.dump import differences, to_yaml
from llama_ft.config.load import check_command_line, load, load_flags
from llama_ft.config.paths import base_model_of, run_entries
from llama_ft.config.rules import WITH_REFERENCE, as_fraction, check_device, stores_reference
from llama_ft.config.run_settings import (
    CheckpointConfig,
    DataConfig,
    MemoryConfig,
    PreferenceConfig,
    ProfileConfig,
    QuantizationConfig,
    TrackingConfig,
    parse_duration,
    parse_size,
)
from llama_ft.config.settings import (
    Config,
    FSDPConfig,
    ModelConfig,
    PeftConfig,
    TrainConfig,
    values_of,
)
