"""Rows -> messages -> tokens and label mask -> batches, with the embedded demo among the datasets."""

from llama_ft.data.batches import (
    Batch,
    BatchSampler,
    StepPlan,
    collate,
    evaluation_batches,
    pad_token_id,
    row_lengths,
    target_token_counts,
)
from llama_ft.data.cache import cache_dir
from llama_ft.data.chat_template import add_missing_tokens, ensure_chat_template, own_template, stop_token_ids
from llama_ft.data.demo import Demo, build_demo
from llama_ft.data.prefetch import Prefetcher, PreparedBatches, StepBatches
from llama_ft.data.prepare import TokenizedData, prepare
from llama_ft.data.samples import describe_first_batch, show_samples
from llama_ft.data.sources import open_source
from llama_ft.data.stream import TrainingBatches, plan_training
from llama_ft.data.tokenize import IGNORED, Encoder

__all__ = [
    "IGNORED",
    "Prefetcher",
    "Batch",
    "BatchSampler",
    "Demo",
    "Encoder",
    "PreparedBatches",
    "StepBatches",
    "StepPlan",
    "TokenizedData",
    "TrainingBatches",
    "build_demo",
    "cache_dir",
    "collate",
    "describe_first_batch",
    "add_missing_tokens",
    "ensure_chat_template",
    "own_template",
    "stop_token_ids",
    "evaluation_batches",
    "open_source",
    "pad_token_id",
    "plan_training",
    "prepare",
    "row_lengths",
    "show_samples",
    "target_token_counts",
]
