"""What a run leaves behind: its directory, complete checkpoints, and the result in Hugging Face format."""

from llama_ft.checkpoint.export import export_adapter, export_model, save_dtype
from llama_ft.checkpoint.merge import merge_adapter
from llama_ft.checkpoint.run_directory import create_run_directory
from llama_ft.checkpoint.sharded import CheckpointWriter

__all__ = [
    "CheckpointWriter",
    "create_run_directory",
    "export_adapter",
    "export_model",
    "merge_adapter",
    "save_dtype",
]
