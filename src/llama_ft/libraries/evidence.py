"""What the code of a model tells about its parts: names of arguments, classes and functions in
Transformers.

They are public, but nobody promises them, and an architecture that names its arguments otherwise is
computed differently here. `check_packing` computes samples both ways, and notices most of it. 5.24
renamed the first two, so old and new names stand here. tests/libraries/test_evidence.py looks for
each one in an architecture that has it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

# Arguments of forward.
# The generation cache: a module that takes it looks back along the sequence.
CACHES = frozenset(
    {
        "past_key_values",  # until 5.23
        "past_key_value",
        "layer_past",
        "cache_params",  # until 5.23
        "past",
        "state",
        "cache",  # from 5.24 on
    }
)
# Position embeddings that count tokens themselves (Bart's, RoBERTa's).
CACHE_LENGTHS = frozenset({"past_key_values_length", "cache_length"})  # until 5.23, from 5.24 on
# Those among them that look up the position_ids that they get (Marian's, Pegasus').
LOOKS_UP_POSITIONS = "input_ids_shape"
# What Transformers passes to flash attention and to kernels of layers with a recurrent state.
FLASH_ATTENTION_ARGUMENTS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)
SAMPLE_OF_TOKEN = "seq_idx"
MASK = "attention_mask"
MERGED = "inputs_embeds"  # embeddings of text and media, [samples, tokens, width]
# Dimensions of a decoder layer's arguments that change between steps: samples and tokens; for packed
# sequences the number of samples and the longest. torch would compile for the first step's sizes,
# and again for each size that changes.
VARYING_DIMENSIONS = (
    *(rf"L\['args'\]\[0\]:{dimension}" for dimension in (0, 1)),  # [samples, tokens, width]
    *(
        rf"L\['keywords'\]\['(position_embeddings|position_ids)'\].*:{dimension}"
        for dimension in (0, 1)
    ),
    # [samples, 1, tokens, tokens]
    *(rf"L\['keywords'\]\['attention_mask'\]:{dimension}" for dimension in (0, 2, 3)),
    r"L\['keywords'\]\['packed_samples'\].offsets:0",
    r"L\['keywords'\]\['packed_samples'\].longest",
)
# Layers with cross attention (Llama 3.2 Vision): 0 or the smallest number, [samples, 1, tokens, keys],
# and 1 for tokens that see a tile, else 0, [samples, 1, tokens, 1].
CROSS_ATTENTION_BIAS = "cross_attention_mask"
SEES_IMAGES = "full_text_row_masked_out_mask"
# Arguments of decoders that add features of images after their first layers (Qwen3-VL): which tokens
# are those of images, [samples, tokens], and a list of features [tokens of images, width].
MEDIA_TOKENS = "visual_pos_masks"
ADDED_FEATURES = "deepstack_visual_embeds"
# Arguments of models that take images: pixels, which of them are not padding, sizes per image in patches
# or in pixels, images per sample, and features of images that were computed before.
PIXELS = "pixel_values"
PIXEL_MASK = "pixel_attention_mask"
GRID_OF_IMAGES = "image_grid_thw"
SIZES_OF_IMAGES = (GRID_OF_IMAGES, "image_sizes", "image_position_ids", "batch_num_images")
ENCODER_OUTPUTS = "mm_encoder_outputs"
# Arguments of towers: sizes per image in patches, or places of patches; which patches have pixels.
SIZES_FOR_TOWERS = ("grid_thw", "pixel_position_ids")
PATCH_MASK = "patch_attention_mask"
# Architectures whose code waits often for the GPU: it reads sizes of images in a tower named `visual`,
# only in `get_image_features`, or looks for images that are padding.
GRID_TOWERS = frozenset(
    {
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "glm4v",
        "glm4v_moe",
    }
)
TAKES_SIZES = frozenset({"llava_next", "llava_onevision", "mistral3", "gemma4"})
PADDED_IMAGES = frozenset({"idefics3", "smolvlm"})
# Arguments of the load-balancing loss that llama_ft computes for routers.
BALANCING_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")

# Names in the file that defines a model.
ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
EAGER_ATTENTION = "eager_attention_forward"
BALANCING_LOSS = "load_balancing_loss_func"
CAUSAL_MASK = "create_causal_mask"
MASK_OF_ENCODERS = "create_bidirectional_mask"

# Attributes of modules.
IS_CAUSAL = "is_causal"  # of attention: False in encoders
SINKS = "sinks"  # of attention: a learned score of each head (gpt-oss)
ROPE_TYPE = "rope_type"  # of rotary embeddings
CROSS_ATTENTION = "cross_attn"
# Attention that counts positions itself, and scales by them (Llama 4's).
COUNTS_POSITIONS = "attn_temperature_tuning"
IMAGE_FEATURES = "get_image_features"  # a method of models that take images
# Of towers that interpolate their position embeddings, and that attend within windows.
INTERPOLATION = "interpolation_mode"
WINDOW = "window_size"

# Gated delta nets, whose heads do not depend on each other: the projections of their inputs (Qwen3.5,
# Qwen3-Next, OLMo Hybrid), other children, and parameters with a number per head.
DELTA_NETS = (
    frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}),
    frozenset({"in_proj_qkvz", "in_proj_ba"}),
    frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"}),
)
CONVOLUTION = "conv1d"
OUTPUT_PROJECTIONS = frozenset({"out_proj", "o_proj"})
NOT_PROJECTIONS = OUTPUT_PROJECTIONS | {CONVOLUTION, "norm", "o_norm"}
PER_HEAD = frozenset({"A_log", "dt_bias"})
# Their channels are queries, keys and values, with the widths in these attributes. Those of other
# projections are divided into heads as a whole.
JOINED = dict.fromkeys(("in_proj_qkv", CONVOLUTION), ("key_dim", "key_dim", "value_dim"))
# Attributes: numbers of heads, and all that a layer with fewer heads has less of.
HEADS = ("num_k_heads", "num_v_heads")
HEAD_SIZES = (*HEADS, "key_dim", "value_dim", "conv_dim")
STATES = "hidden_states"  # the argument with their input

# Classes.
# Classes without weights whose torch operations mix dtypes if their inputs are in 16 bits.
# Transformers computes them only under autocast.
FP32_KERNELS = frozenset({"xLSTMBackend"})

# MLPs, which compute each token by itself, and the arguments of their forward.
MLP_CLASSES = re.compile("MLP|Mlp|FeedForward|FFN|DenseAct")
MLP_PARAMETERS = (("x",), ("hidden_states",), ("hidden_state",), ("hidden_states", "residual"))
# Arguments of experts that get the choices of each token.
ROUTED_PARAMETERS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),  # gpt-oss
)
# What else an MLP contains: modules from these files, norms of each token, and BLOOM's activation.
ACTIVATIONS = frozenset(
    {
        "transformers.activations",
        "torch.nn.modules.activation",
        "torch.nn.modules.dropout",
        "torch.nn.modules.linear",  # Identity
    }
)
PER_TOKEN_CLASSES = re.compile("(RMS|Layer)Norm$|G[Ee][Ll][Uu]$")

# How experts multiply (`_experts_implementation`). Other ways may be kernels that read the address
# of a weight.
EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")

# The text of an error: what to install for a kernel.
MISSING_KERNEL = re.compile(r"without `([^`]+)`")


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Return whether a layer gets a generation cache."""
    return any(arguments.get(name) is not None for name in CACHES)


def is_experts(module: object) -> bool:
    """Return whether a module holds stacked experts, by the name of its class."""
    return "Experts" in type(module).__name__


def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a class's `forward`."""
    _, *names = inspect.signature(forward).parameters
    return tuple(names)
