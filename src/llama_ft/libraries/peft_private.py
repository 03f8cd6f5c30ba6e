"""Private names of PEFT, seen in 0.21.2, and names in modules that its documentation does not
describe."""

# (owner, what needs it) -> names. A function has the parameters that are passed here.
NAMES = {
    ("tuners.tuners_utils", "adapters"): "BaseTunerLayer",
    # Set by `adapter_off`: enable_adapters(False) would also set requires_grad, which shards keep.
    (
        "tuners.tuners_utils.BaseTunerLayer",
        "a reference without a second model",
    ): "_disable_adapters",
    # PEFT's own check of Mamba's layers, whose adapters would have no effect.
    ("tuners.tuners_utils", "adapters of Mamba"): (
        "_check_lora_target_modules_mamba(peft_config, model, target_name)"
    ),
    ("tuners.lora.layer", "LoRA"): "Linear LoraLayer ParamWrapper",
    # Overridden: PEFT's own way temporarily replaces the parameter by a copy with the adapter.
    ("tuners.lora.layer.ParamWrapper", "LoRA on experts"): "_activate_lora(active_adapters)",
    ("tuners.trainable_tokens", "the training of new tokens"): "TrainableTokensLayer",
    # Gemma's embeddings multiply by it.
    ("tuners.trainable_tokens.TrainableTokensLayer", "the training of new tokens"): (
        "_get_embed_scale()"
    ),
    (
        "utils.other",
        "rank_pattern and alpha_pattern",
    ): "get_pattern_key(pattern_keys, key_to_match)",
    ("utils.transformers_weight_conversion", "adapters of experts"): (
        "convert_peft_adapter_state_dict_for_transformers(model, peft_config, adapter_state_dict)"
    ),
    ("mapping", "adapters"): "PEFT_TYPE_TO_CONFIG_MAPPING PEFT_TYPE_TO_PREFIX_MAPPING",
}
