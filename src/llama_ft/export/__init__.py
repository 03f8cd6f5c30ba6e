"""Write the final model or adapter in Hugging Face format, for Transformers and PEFT."""

from llama_ft.export.export_checkpoint import Exporter, find_valid, tokens_added, understood_adapter
from llama_ft.export.export_settings import check_export
from llama_ft.export.weights import (
    copy_adapter,
    export_adapter,
    export_model,
    export_policy,
    save_dtype,
    write_model_card,
)
