"""Rows -> messages -> tokens and label mask -> batches, with the embedded demo among the datasets."""

from llama_ft.data.batches import (
    Batch,
    BatchPlan,
    StepPlan,
    collate,
    evaluation_batches,
    pad_token_id,
    plan_batches,
    row_lengths,
    target_token_counts,
)
from llama_ft.data.cache import cache_dir
from llama_ft.data.chat_template import ensure_chat_template
from llama_ft.data.demo import Demo, build_demo
from llama_ft.data.prepare import TokenizedData, prepare
from llama_ft.data.sources import open_source, read_rows
from llama_ft.data.tokenize import IGNORED, Encoder

__all__ = [
    "IGNORED",
    "Batch",
    "BatchPlan",
    "Demo",
    "Encoder",
    "StepPlan",
    "TokenizedData",
    "build_demo",
    "cache_dir",
    "collate",
    "ensure_chat_template",
    "evaluation_batches",
    "open_source",
    "pad_token_id",
    "plan_batches",
    "prepare",
    "read_rows",
    "row_lengths",
    "target_token_counts",
]
