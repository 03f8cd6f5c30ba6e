"""Load a checkpoint directory as a sharded model: build it on the meta device, add adapters, shard
it, load weights."""

from llama_ft.models.quantization.layers import describe_trained, total_weights

# isort: split
from llama_ft.models.adapters.lora import describe_experts, inject_lora
from llama_ft.models.architecture.groups import freeze, freeze_first_layers, freeze_groups
from llama_ft.models.architecture.routers import use_router_loss
from llama_ft.models.architecture.score_head import choose_head
from llama_ft.models.architecture.text_part import (
    auto_class,
    stop_ids,
    why_text_only,
)
from llama_ft.models.base.source import fingerprint
from llama_ft.models.build import (
    build_on_meta,
    check_no_adapter,
    find_new_tokens,
    load_tokenizer,
    local_folder,
    portable_name,
    resolve_context_length,
    vocabulary_size,
)
from llama_ft.models.built import BuildModel, BuiltModel, ModelRequest, NewTokens
from llama_ft.models.computing.activation_checkpointing import checkpoint_activations
from llama_ft.models.computing.chunked_loss import use_chunked_loss
from llama_ft.models.computing.compiled import (
    choose_liger,
    compile_layers,
    fuse_layers,
    without_graphs,
)
from llama_ft.models.computing.embedding_noise import add_embedding_noise
from llama_ft.models.computing.tiled_mlp import use_tiled_mlp
from llama_ft.models.model_config import load_model_config
from llama_ft.models.packing.packed_attention import packed_arguments, use_packed_attention
from llama_ft.models.published.formats import published_format
from llama_ft.models.published.quantization_config import remove_quantization_config
from llama_ft.models.published.sources import describe_published
from llama_ft.models.quantization.choice import choose_quantization, quantize_linears
from llama_ft.models.sharding.dtypes import set_storage_dtypes
from llama_ft.models.sharding.fsdp import (
    apply_fsdp,
    shard_degree,
    unit_table,
)
from llama_ft.models.towers import build_requested, describe_towers, trains_towers
from llama_ft.models.weights.load_weights import LoadSettings, load_weights
