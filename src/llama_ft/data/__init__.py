"""Raw samples -> messages -> tokens and loss mask -> batches. The embedded demo is one of the
datasets."""

from llama_ft.data.batches.prefetch import Prefetcher, StepBatches
from llama_ft.data.batches.sampler import (
    BATCHES_VERSION,
    Batch,
    BatchLayout,
    collate,
    evaluation_batches,
    example_lengths,
    group_size,
    pad_token_id,
)
from llama_ft.data.batches.stream import TrainingBatches, plan_training, training_layout
from llama_ft.data.cache import cache_dir
from llama_ft.data.chat.chat_template import RENDER_ERRORS, ensure_chat_template, stop_token_ids
from llama_ft.data.demo import Demo, build_demo
from llama_ft.data.media import Media, MediaModel, media_reader
from llama_ft.data.prepare import DataRequest, TokenizedData, prepare
from llama_ft.data.read.sources import open_source
from llama_ft.data.samples import describe_first_batch, show_samples
from llama_ft.data.tokenize.content import SPLIT_VERSION
from llama_ft.data.tokenize.encoder import (
    IGNORED,
    Encoder,
    check_ids,
    one_example,
    two_examples,
    unpaired_examples,
)
from llama_ft.data.tokenize.prompt_tokens import AS_TEXT
