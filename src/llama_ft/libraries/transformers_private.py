"""Private names of Transformers, seen in 5.23.0 and 5.24.0, and names in modules that its
documentation does not describe."""

from typing import Any

MODEL = "modeling_utils.PreTrainedModel"
# (owner, what needs it) -> names. A function has the parameters that are passed here.
NAMES = {
    # Attributes of models and configs. `private` reads them: without one, the feature works as the
    # purpose says.
    (MODEL, "the computation of buffers that no checkpoint holds"): "_init_weights(module)",
    (MODEL, "quantization, to leave routers as they are,"): "_can_record_outputs",
    (MODEL, "the choice of layers that stay in fp32"): (
        "_keep_in_fp32_modules _keep_in_fp32_modules_strict"
    ),
    (MODEL, "the choice of tensors in a checkpoint that a model does not need"): (
        "_keys_to_ignore_on_load_unexpected"
    ),
    (MODEL, "the search for decoder layers"): "_no_split_modules",
    (MODEL, "packing"): "_supports_attention_backend",
    # `keep_samples_for_recomputation` replaces this attribute of layers.
    (MODEL, "packing with activation checkpointing"): "_gradient_checkpointing_func",
    # `reads_as` and `weights_stay_tied` replace this method while an evaluation builds its model.
    (MODEL, "evaluation tasks"): "tie_weights",
    # Set on parameters and buffers of the checkpoint: `_init_weights` leaves these as they are.
    (MODEL, "the first values of weights"): "_is_hf_initialized",
    # Written, too: a registered function is chosen by this name, and `set_attn_implementation` would
    # ask the Hub for it.
    ("PretrainedConfig", "packing"): "_attn_implementation",
    ("PretrainedConfig", "LoRA on experts"): "_experts_implementation",
    # Not written into an exported config.json: it names a directory of this machine.
    ("PretrainedConfig", "export"): "_name_or_path",
    ("models.rwkv.modeling_rwkv.RwkvModel", "RWKV"): "_rescale_layers()",
    # Frequencies of longrope and yarn, which a GGUF file holds as factors.
    ("modeling_rope_utils", "export to GGUF"): "ROPE_INIT_FUNCTIONS",
    # A processor is loaded with a given tokenizer, and without torchvision.
    ("processing_utils.ProcessorMixin", "samples with images"): (
        "_get_arguments_from_pretrained(pretrained_model_name_or_path) "
        "check_argument_for_proper_class(argument_name, argument)"
    ),
    # What towers compute from the sizes of images: here on the host.
    ("vision_utils", "samples with images"): (
        "get_vision_cu_seqlens(grid_thw) get_vision_position_ids(grid_thw, spatial_merge_size) "
        "get_vision_window_index(grid_thw, spatial_merge_size, window_size, patch_size) "
        "get_vision_interpolation_indices_and_weights("
        "grid_thw, num_grid_per_side, mode, align_corners, spatial_merge_size)"
    ),
    # Replaced: it indexes with a mask, which waits for the GPU.
    ("models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel", "samples with images"): (
        "_deepstack_process(hidden_states, visual_pos_masks, visual_embeds)"
    ),
    ("models.auto.processing_auto", "samples with images"): (
        "PROCESSOR_MAPPING_NAMES processor_class_from_name(class_name)"
    ),
    # Functions that are replaced: models/base/replaced_functions.py has the reasons.
    ("masking_utils", "packing"): (
        "find_packed_sequence_indices(position_ids) "
        "_ignore_causal_mask_sdpa(padding_mask, q_length, kv_length, q_offset, kv_offset)"
    ),
    ("integrations.sdpa_attention", "attention with shared key heads"): (
        "use_gqa_in_sdpa(attention_mask, key, value)"
    ),
    ("integrations.moe", "the biases of experts"): (
        "_grouped_linear(input, weight, offs, bias, is_transposed)"
    ),
    # A plan replaces it: kernels of layers with a recurrent state need CUDA.
    ("integrations.hub_kernels", "the plan of a model's memory"): "is_torchdynamo_exporting()",
    # The functions that Transformers itself registers: calls without packed samples go there.
    ("masking_utils", "padded batches"): "eager_mask sdpa_mask",
    ("integrations.sdpa_attention", "padded batches"): (
        "repeat_kv(hidden_states, n_rep) "
        "sdpa_attention_forward(module, query, key, value, attention_mask)"
    ),
    # Chat templates: Transformers' own way to render keeps no spans of assistant responses.
    ("utils.chat_template_utils", "the rendering of chat templates"): (
        "_compile_jinja_template(chat_template) render_jinja_template(conversations)"
    ),
    # How published tensors become the model's: the objects run here on the requested rows only.
    ("core_model_loading", "reading checkpoints"): (
        "Chunk Concatenate ConversionOps Interleave MergeModulelist Split SplitModulelist Transpose "
        "WeightConverter WeightRenaming WeightTransform "
        "apply_converters(source_key, weight_converters) "
        "apply_renamings(source_key, weight_renamings) dot_natural_key(s) "
        "rename_source_key(source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict)"
    ),
    ("conversion_mapping", "reading checkpoints"): "get_model_conversion_mapping(model)",
    ("quantizers.base", "quantization"): "get_keys_to_not_convert(model)",
    ("quantizers.quantizers_utils", "quantization"): "should_convert_module(full_name, patterns)",
    ("models.auto.modeling_auto", "the search for a model's class"): (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES "
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    ),
    # Norms with the same code as this one get a faster kernel.
    ("models.llama.modeling_llama", "fused kernels"): "LlamaRMSNorm",
    ("pytorch_utils", "GPT-2"): "Conv1D",
    # Replaced: it indexes with lists, which waits for the GPU.
    ("models.falcon.modeling_falcon.FalconAttention", "Falcon"): "_split_heads(fused_qkv)",
    ("dynamic_module_utils", "export of models with own code"): (
        "get_relative_import_files(module_file)"
    ),
    ("generation", "answers"): "GenerationMode",
    # Replaced: it waits for the GPU after each token.
    ("generation.utils", "sampling"): "StopCheck(streamer)",
}
_ATTRIBUTES = {
    name
    for (owner, _), names in NAMES.items()
    if owner in (MODEL, "PretrainedConfig")
    for name in names.replace("(module)", "").split()
}


def private(owner: Any, name: str) -> Any:
    """Return a listed attribute of a model or its config; None if this version of Transformers lacks
    it."""
    assert name in _ATTRIBUTES
    return getattr(owner, name, None)
