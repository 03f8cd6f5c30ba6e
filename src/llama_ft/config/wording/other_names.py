"""Names and values of other trainers, and what replaces them here. The tables in docs/migrate have
the same, with defaults and notes; tests/repository/test_migration.py compares them.

`explain_unknown` looks here first. A name that is only spelled similarly may mean something else:
axolotl's `base_model` is `model_name` and not `save_model`.
"""

from llama_ft.config.objectives import OBJECTIVES

# Our setting, perhaps with a value -> the names of others, of TRL, Transformers, accelerate,
# axolotl, torchtune, LLaMA-Factory, ms-swift and unsloth, and of llama-recipes if they are not here.
# Several settings are separated by " and ". A dotted name is only that key of that section.
_NAMES: dict[str, str] = {
    "model_name": "model model_name_or_path base_model checkpoint_dir model_id_or_path",
    "tokenizer_name": "tokenizer tokenizer_config tokenizer.path",
    "precision": "dtype torch_dtype",
    "precision bf16_mixed": "bf16 mixed_precision",
    "precision bf16_pure": "pure_bf16 bfloat16",
    "precision fp16": "fp16 use_fp16",
    "precision fp32": "fp32 float32",
    "device cpu": "use_cpu",
    "attn_implementation": "flash_attn attn_impl",
    "attn_implementation sdpa": "use_fast_kernels sdp_attention",
    "attn_implementation flash_attention_2": "flash_attention use_flash_attention use_flash_attn",
    "attn_implementation eager": "eager_attention",
    "compile": "torch_compile torch_compile_backend torch_compile_mode",
    "use_liger": "use_liger_kernel enable_liger_kernel liger_kernel_config liger_rope liger_rms_norm "
    "liger_glu_activation liger_fused_linear_cross_entropy plugins",
    "resize_embeddings": "special_tokens tokens added_tokens_overrides resize_vocab add_tokens",
    "freeze_layers and num_freeze_layers": "unfrozen_parameters freeze_trainable_layers",
    "max_pixels": "image_max_pixels",
    "use_peft": "lora use_lora adapter finetuning_type train_type tuner_type",
    "quantization": "quantization_bit quant_bits",
    "quantization 4bit": "qlora use_qlora load_in_4bit quantize_base",
    "quantization 8bit": "load_in_8bit",
    "quant_type": "bnb_4bit_quant_type",
    "compute_dtype": "bnb_4bit_compute_dtype",
    "double_quant": "use_bnb_nested_quant bnb_4bit_use_double_quant double_quantization",
    "from_peft_checkpoint": "lora_model_dir adapter_name_or_path adapters",
    "peft.r": "lora_r lora_rank",
    "target_modules": "lora_target_modules lora_target_linear lora_attn_modules lora_target",
    "target_modules q_proj,v_proj,gate_proj,up_proj,down_proj": "apply_lora_to_mlp",
    "target_modules q_proj,v_proj,lm_head": "apply_lora_to_output",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save additional_target",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
    "init_lora_weights": "peft_init_lora_weights",
    "dataset": "data_path dataset_name train_file datasets pretraining_dataset dataset.source data_files train_dataset",
    "dataset org/name:configuration": "dataset_config",
    "dataset_format": "conversation_style",
    "dataset_split": "dataset_train_split dataset.split",
    "validation": "test_datasets val_set_size dataset_val val_size eval_dataset val_dataset "
    "split_dataset_ratio validation_split test_size",
    "validation test": "dataset_test_split",
    "columns": "dataset_text_field conversation_column column_map",
    "streaming": "dataset_streaming",
    "context_length": "max_length max_seq_length sequence_len max_seq_len cutoff_len seq_len model_max_length",
    "truncation": "truncation_strategy",
    "truncation right": "truncation_mode",
    "truncation drop": "excess_length_strategy",
    "batching_strategy packing": "packing sample_packing packed neat_packing",
    "labels": "roles_to_train",
    "labels all": "train_on_inputs train_on_input train_on_prompt",
    "labels completion": "completion_only_loss train_on_completions_only",
    "labels assistant": "assistant_only_loss train_on_responses_only",
    "chat_template": "chat_template_path chat_template_jinja template",
    "tokenize_processes": "dataset_num_proc dataset_processes preprocessing_num_workers",
    "objective": "rlhf_type pref_loss",
    "batch_size_training": "batch_size micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "val_batch_size": "per_device_eval_batch_size eval_batch_size batch_size_val",
    "gradient_accumulation_steps": "accumulate_grad_batches grad_accum_steps",
    "num_epochs": "num_train_epochs epochs max_epochs",
    "max_train_step": "max_steps max_steps_per_epoch",
    "lr": "learning_rate optimizer.lr",
    "lr_scheduler": "lr_scheduler_type lr_scheduler._component_ lr_schedule",
    "warmup_steps": "num_warmup_steps",
    "optimizer": "optim optimizer._component_ optimizer_type",
    "weight_decay": "optimizer.weight_decay",
    "gradient_clipping and gradient_clipping_threshold": "max_grad_norm clip_grad_norm gradient_clip_val",
    "activation_checkpointing full": "gradient_checkpointing enable_activation_checkpointing "
    "fsdp_activation_checkpointing use_gradient_checkpointing",
    "activation_checkpointing every_k": "ac_mode",
    "activation_checkpointing_k": "ac_option",
    "activation_offload": "activation_offloading enable_activation_offloading",
    "seed": "data_seed random_state random_seed",
    "eval_steps": "eval_strategy eval_delay eval_on_start run_val_every_n_steps val_check_interval",
    "eval_steps and save_steps and save_every_epoch": "evals_per_epoch saves_per_epoch",
    "early_stopping_patience": "load_best_model_at_end metric_for_best_model greater_is_better",
    "save_steps": "save_strategy every_n_train_steps",
    "save_async": "enable_async_checkpointing",
    "keep_last": "save_total_limit",
    "overwrite": "overwrite_output_dir",
    "output_dir": "dist_checkpoint_root_folder dist_checkpoint_folder",
    "resume auto": "resume_from_checkpoint auto_resume_from_checkpoints recipe_checkpoint",
    "log_steps": "logging_steps logging_strategy logging_first_step log_on_each_node "
    "logging_nan_inf_filter log_every_n_steps",
    "use_wandb and use_tensorboard and use_mlflow": "report_to metric_logger",
    "wandb_project": "project",
    "wandb_entity": "entity",
    "wandb_tags": "tags",
    "wandb_job_type": "job_type",
    "wandb_group": "group",
    "wandb_notes": "notes",
    "wandb_name": "run_name",
    "mlflow_experiment": "mlflow_experiment_name",
    "mlflow_name": "mlflow_run_name",
    "mlflow_log_model": "hf_mlflow_log_artifacts",
    "memory_snapshot": "profiler_steps",
    "use_profiler": "profiler.enabled",
    "profiler_dir": "profiler.output_dir",
    "device_memory_fraction": "gpu_memory_limit",
    "enable_fsdp": "fsdp fsdp_config distributed_type deepspeed",
    "sharding_strategy": "reshard_after_forward fsdp_reshard_after_forward",
    "sharding_strategy HYBRID_SHARD": "hsdp",
    "sharding_group_size": "replica_group_size dp_shard_size dp_replicate_size data_parallel_shard_dim "
    "data_parallel_replicate_dim",
    "sequence_parallel_size": "sequence_parallel_degree context_parallel_degree",
    "fsdp_cpu_offload": "offload_params fsdp_offload_params offload_optimizer offload_param",
    "low_cpu_fsdp": "cpu_ram_efficient_loading low_cpu_ram fsdp_sync_module_states",
    "fsdp_wrap_policy": "auto_wrap_policy",
    "fsdp_wrap_policy hybrid": "custom_sharded_layers memory_efficient_fsdp_wrap",
    "collective_timeout": "ddp_timeout",
}
SAME_AS: dict[str, str] = {name: ours for ours, names in _NAMES.items() for name in names.split()}

# Names that have no counterpart here. docs/migrate says for each what happens instead.
WITHOUT_COUNTERPART: frozenset[str] = frozenset(
    "model_revision model_init_kwargs lora_task_type bnb_4bit_quant_storage packing_strategy padding_free "
    "eval_packing pad_to_multiple_of eos_token pad_token dataset_kwargs ignore_bias_buffers shuffle_dataset "
    "train_sampling_strategy group_by_length length_column_name dataloader_num_workers dataloader_drop_last "
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names optim_args "
    "optim_target_modules lr_scheduler_kwargs bf16_full_eval fp16_full_eval tf32 average_tokens_across_devices "
    "auto_find_batch_size activation_checkpointing_kwargs gradient_checkpointing_kwargs use_cache "
    "torch_empty_cache_steps full_determinism accelerator_config parallelism_config do_train do_eval do_predict "
    "debug local_rank prediction_loss_only include_for_metrics batch_eval_metrics eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object save_only_model save_on_each_node enable_jit_checkpoint "
    "ignore_data_skip restore_callback_states_from_checkpoint hub_token hub_strategy hub_always_push hub_revision "
    "trackio_space_id trackio_bucket_id trackio_static_space_id log_level log_level_replica disable_tqdm "
    "include_num_input_tokens_seen skip_memory_metrics fsdp_version transformer_layer_cls_to_wrap "
    "fsdp_transformer_layer_cls_to_wrap state_dict_type fsdp_state_dict_type ddp_find_unused_parameters "
    "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend message_field_training model_type "
    "tokenizer_type base_model_config cls_model_config processor_type tokenizer_use_fast "
    "peft_layers_to_transform relora lora_mlp_kernel lora_qkv_kernel lora_o_kernel eval_sample_packing "
    "pad_to_sequence_len sample_packing_group_size dataset_prepared_path shuffle_merged_datasets lr_groups "
    "cosine_min_lr_ratio fp8 float16 rl trl final_state_dict_type "
    "tensor_parallel_size save_adapter_weights_only shuffle collate_fn loss "
    "num_output_chunks optimizer_in_bwd enable_fp8_training fp8_recipe_name tensor_parallel_dim "
    "tensor_parallel_plan log_peak_memory_stats model._component_ checkpointer._component_ "
    "tokenizer._component_".split()
)

# Names that belong to recipes/export.py.
EXPORTING: dict[str, str] = {
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_private_repo"), "--push_to_hub OWNER/NAME uploads it"
    ),
    "merge_lora": "--merge merges the adapter",
}

# setting -> our value -> how others write it, in lower case
_VALUES: dict[str, dict[str, str]] = {
    "precision": {
        "bf16_mixed": "bf16 bf16-mixed bfloat16 mixed",
        "bf16_pure": "bf16-true pure_bf16",
        "fp16": "16 16-mixed float16 half fp16_mixed",
        "fp32": "32 32-true float32 float no",
    },
    "optimizer": {
        "AdamW": "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused",
        "AdamW8bit": "adamw_bnb_8bit adamw_8bit paged_adamw_8bit pagedadamw8bit adamw_torch_8bit",
    },
    "lr_scheduler": {
        "constant": "constant_with_warmup",
        "cosine": "get_cosine_schedule_with_warmup cosine_with_warmup",
        "warmup_stable_decay": "wsd",
    },
    "attn_implementation": {
        "flash_attention_2": "flash_attention flash_attn flash fa fa2 flash_attention2",
        "flash_attention_3": "fa3 flash_attention3",
        "sdpa": "sdp torch",
    },
    "mode": {
        "4bit": "4 4-bit int4 nf4 fp4 bnb qlora",
        "8bit": "8 8-bit int8 llm.int8",
    },
    "activation_checkpointing": {"full": "true", "off": "false none"},
    "truncation": {
        "right": "keep_start truncate",
        "left": "keep_end",
        "drop": "delete",
        "split": "bfd_split",
    },
    "batching_strategy": {"packing": "pack packed bfd", "padding": "pad"},
    "fsdp_wrap_policy": {"transformer": "transformer_based_wrap", "size": "size_based_wrap"},
    "save_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "compute_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "device": {"cuda": "gpu"},
    "sharding_strategy": {
        "FULL_SHARD": "zero3 zero-3 fsdp full",
        "SHARD_GRAD_OP": "zero2 zero-2",
        "NO_SHARD": "ddp",
        "HYBRID_SHARD": "hsdp",
    },
    "labels": {"assistant": "assistant_only", "completion": "completion_only"},
    "objective": {name: entry.other_names for name, entry in OBJECTIVES.items()},
}
SAME_VALUES: dict[tuple[str, str], str] = {
    (setting, theirs): ours
    for setting, values in _VALUES.items()
    for ours, words in values.items()
    for theirs in words.split()
}
