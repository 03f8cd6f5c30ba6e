"""What llama-recipes, torchtune, TRL and axolotl call things. docs/from-*.md say it at length; a test compares them."""

from collections.abc import Mapping
from typing import NamedTuple


class Trainer(NamedTuple):
    """Another trainer.

    Attributes:
        name: as it calls itself.
        page: where its names are explained.
        names: those that differ from ours: what they are here, a setting and perhaps its value, or else a sentence
            saying what to do instead. A name is dotted where its last part alone would say too little.
    """

    name: str
    page: str
    names: Mapping[str, str]


CLIPPING = "use gradient_clipping, and gradient_clipping_threshold for the norm"
DOUBLE_QUANT = (
    "scales are kept in fp32: double quantization puts 256 of them in a block, across rows, and rows are what is "
    "sharded. It would save 0.4 bits a weight. Leave it out"
)
QUANT_STORAGE = "4-bit weights are stored as bytes and sharded by rows, whatever holds them. Leave it out"
WORKERS = "rows are tokenized before training and need no workers. Leave it out"
FUNCTION = "use dataset path/to/file.py:function"
REPLICAS = "use sharding_strategy HYBRID_SHARD and sharding_group_size: the replicas follow"
ADAMW = "AdamW has torch's own betas and epsilon. Leave it out, or edit src/llama_ft/training/optimizer.py"
SHUFFLED = "rows are always shuffled, by the seed. Leave it out"
PARALLEL = (
    "parameters are sharded over the ranks, and nothing else is split. Use enable_fsdp, and a shorter context_length"
)
REPORTS = "use_wandb, use_tensorboard and use_mlflow say where to; output_dir/metrics.jsonl is always written"
LANGUAGE_MODELS = "language models are trained as such. Leave it out"
LOSS = "the loss is cross-entropy, computed in parts. docs/adding-a-loss.md says how to change it"
RENAME = "use the column names of a dataset_format, or a function: dataset path/to/file.py:function"
HUB = "use recipes/export.py --push_to_hub, after the run"
EVALUATES = "it always trains, and evaluates where there is validation data. Leave it out"
NOT_REENTRANT = "recomputation is never reentrant. Leave it out"
NO_FP8 = "nothing is computed in fp8. Use precision bf16_mixed"
TOKENS = "save them in a tokenizer, and use tokenizer_name and resize_embeddings"
PEFT_METHOD = "peft_method lora is the one that exists"
STATE_DICTS = "checkpoints are always sharded, and the result is in Hugging Face format. Leave it out"
SAID_BY_CONFIG = "config.json says it. Leave it out"
NOTHING = "nothing takes its place, as {page} says. Leave it out"

# What false says where the name, without it, says another value than our default; of all others it is our default.
OF_FALSE = {
    "precision bf16_mixed": "precision fp32",
    "batching_strategy packing": "batching_strategy padding",
    "labels completion": "labels all",
    "labels assistant": "labels all",
}
# Optimizers of transformers' (optim, axolotl's optimizer) that a likeness of letters would not find.
OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW"}

LLAMA_RECIPES = {
    "one_gpu": "a run without torchrun is one process on one device. Leave it out",
    "pure_bf16": "use precision bf16_pure",
    "mixed_precision": "use precision bf16_mixed (the default), or fp32 for false",
    "use_fp16": "use precision bf16_mixed (the default), or fp16 on GPUs without bf16",
    "use_fast_kernels": "use attn_implementation; sdpa, which auto takes, has torch's fastest kernels",
    "hsdp": "use sharding_strategy HYBRID_SHARD",
    "replica_group_size": REPLICAS,
    "checkpoint_type": STATE_DICTS,
    "fsdp_activation_checkpointing": "use activation_checkpointing full",
    "enable_activation_checkpointing": "activation_checkpointing full",
    "activation_checkpointing_use_reentrant": NOT_REENTRANT,
    "enable_memory_monitoring": "memory peaks are always written to output_dir/metrics.jsonl. Leave it out",
    "memory_monitoring_interval": "memory peaks are written with every log_steps. Leave it out",
    "dist_checkpoint_root_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "dist_checkpoint_folder": "use output_dir: checkpoints are written to output_dir/checkpoints",
    "save_optimizer": "checkpoints always hold the optimizer. Use save_steps to say how often",
    "save_metrics": "metrics are always written to output_dir/metrics.jsonl. Leave it out",
    "use_double_quant": DOUBLE_QUANT,
    "quant_storage": QUANT_STORAGE,
    "freeze_LLM_only": "only language models are trained here. Use freeze_layers",
    "num_workers_dataloader": WORKERS,
    "custom_dataset.file": FUNCTION,
    "custom_dataset.train_split": "use dataset_split; a function of yours decides itself",
    "custom_dataset.test_split": "use validation; a function of yours decides itself",
    "data_path": "dataset",
    "task_type": LANGUAGE_MODELS,
    "inference_mode": "adapters are trained here. Leave it out",
    "adapter_len": PEFT_METHOD,
    "adapter_layers": PEFT_METHOD,
    "num_virtual_tokens": PEFT_METHOD,
    "project": "wandb_project",
    "entity": "wandb_entity",
    "tags": "wandb_tags",
    "job_type": "wandb_job_type",
    "group": "wandb_group",
    "notes": "wandb_notes",
}

# transformers' TrainingArguments, which TRL's SFTConfig extends and axolotl hands on, and the FSDP settings of both
# (accelerate writes them with fsdp_ before them).
TRANSFORMERS = {
    "learning_rate": "lr",
    "bf16": "precision bf16_mixed",
    "fp16": "precision fp16",
    "gradient_checkpointing": "activation_checkpointing full",
    "activation_offloading": "activation_offload",
    "max_steps": "max_train_step",
    "max_grad_norm": CLIPPING,
    "warmup_ratio": "use warmup_steps, a number of optimizer steps",
    "optim_args": ADAMW,
    "adam_beta1": ADAMW,
    "adam_beta2": ADAMW,
    "adam_epsilon": ADAMW,
    "logging_steps": "log_steps",
    "eval_strategy": "use eval_steps: validation is after every epoch, and every so many steps",
    "save_strategy": "use save_steps and save_every_epoch",
    "save_total_limit": "keep_last",
    "save_only_model": "checkpoints always hold what going on needs. Leave it out",
    "load_best_model_at_end": "use early_stopping_patience, which takes the best weights",
    "resume_from_checkpoint": "resume",
    "torch_compile": "compile",
    "neftune_noise_alpha": "no noise is added to embeddings. Leave it out",
    "auto_find_batch_size": "use recipes/plan.py --fit, which says beforehand what fits",
    "group_by_length": "use batching_strategy padding, which takes rows of like length together",
    "dataloader_num_workers": WORKERS,
    "hub_model_id": HUB,
    "hub_strategy": HUB,
    "ddp_timeout": "collective_timeout",
    "load_in_8bit": "quantization 8bit",
    "load_in_4bit": "quantization 4bit",
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_target_parameters": "use target_modules all-linear, which takes experts too where peft can adapt them",
    "model_revision": "the main branch is taken. Download another and give its folder as model_name",
    "dataset_num_proc": "tokenize_processes",
    "deepspeed": "use enable_fsdp: FSDP2 shards parameters, gradients and optimizer, as ZeRO 3 does",
    "fsdp": "enable_fsdp",
    "fsdp_version": "it is always FSDP2. Leave it out",
    "reshard_after_forward": "use sharding_strategy FULL_SHARD for true, SHARD_GRAD_OP for false",
    "offload_params": "fsdp_cpu_offload",
    "cpu_ram_efficient_loading": "low_cpu_fsdp",
    "auto_wrap_policy": "fsdp_wrap_policy",
    "transformer_layer_cls_to_wrap": "decoder layers are found by themselves. Leave it out",
    "state_dict_type": STATE_DICTS,
    "fsdp_config": "enable_fsdp",
    "tf32": NOTHING,
}

# Names of TRL's that nothing here takes the place of.
TRL_ALONE = """
model_init_kwargs router_aux_loss_coef pad_to_multiple_of dataset_kwargs ignore_bias_buffers length_column_name
dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names optim_target_modules
lr_scheduler_kwargs bf16_full_eval fp16_full_eval average_tokens_across_devices torch_empty_cache_steps
full_determinism accelerator_config parallelism_config do_predict debug local_rank prediction_loss_only
include_for_metrics batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
save_on_each_node enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint trackio_space_id
trackio_bucket_id trackio_static_space_id log_level log_level_replica disable_tqdm include_num_input_tokens_seen
skip_memory_metrics ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
"""

TRL = TRANSFORMERS | {
    **dict.fromkeys(TRL_ALONE.split(), NOTHING),
    "model_name_or_path": "model_name",
    "dtype": "precision",
    "torch_dtype": "precision",
    "per_device_train_batch_size": "batch_size_training",
    "per_device_eval_batch_size": "val_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "max_length": "context_length",
    "max_seq_length": "context_length",
    "truncation_mode": "truncation",
    "packing": "batching_strategy packing",
    "packing_strategy": "packing keeps rows whole, by best fit; truncation says what becomes of longer ones",
    "padding_free": "use batching_strategy packing, which has next to no padding",
    "eval_packing": "validation rows go the way of batching_strategy. Leave it out",
    "completion_only_loss": "labels completion",
    "assistant_only_loss": "labels assistant",
    "loss_type": LOSS,
    "label_smoothing_factor": LOSS,
    "chat_template_path": "chat_template",
    "shuffle_dataset": SHUFFLED,
    "dataset_name": "dataset",
    "dataset_config": "write it behind the name: dataset org/name:configuration",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "validation",
    "dataset_streaming": "streaming",
    "dataset_text_field": RENAME,
    "use_liger_kernel": "use_liger",
    "use_cpu": "device cpu",
    "report_to": REPORTS,
    "run_name": "wandb_name",
    "project": "wandb_project",
    "push_to_hub": HUB,
    "hub_token": HUB,
    "hub_private_repo": HUB,
    "hub_revision": HUB,
    "do_train": EVALUATES,
    "do_eval": EVALUATES,
    "data_seed": "seed",
    "gradient_checkpointing_kwargs": NOT_REENTRANT,
    "use_cache": "training keeps no cache of keys and values. Leave it out",
    "eos_token": "the tokenizer has it; tokenizer_name names another",
    "pad_token": "a tokenizer without one is fine. Leave it out",
    "train_sampling_strategy": SHUFFLED,
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_compute_dtype": "compute_dtype",
    "bnb_4bit_use_double_quant": DOUBLE_QUANT,
    "use_bnb_nested_quant": DOUBLE_QUANT,
    "bnb_4bit_quant_storage": QUANT_STORAGE,
    "lora_task_type": LANGUAGE_MODELS,
    "activation_checkpointing_kwargs": NOT_REENTRANT,
    "torch_compile_backend": "use compile, which takes torch's default backend",
    "torch_compile_mode": "use compile, which takes torch's default mode",
    "liger_kernel_config": "use use_liger, which takes all of Liger's but its loss",
    "eval_delay": "use eval_steps: validation is after every epoch, and every so many steps",
    "eval_on_start": "validation is before training too; eval_steps says when else. Leave it out",
    "metric_for_best_model": "early_stopping_patience goes by the validation loss. Leave it out",
    "greater_is_better": "early_stopping_patience goes by the validation loss. Leave it out",
    "hub_always_push": HUB,
    "logging_strategy": "use log_steps, a number of optimizer steps",
    "logging_first_step": "log_steps 1, the default, writes every step. Leave it out",
    "log_on_each_node": "rank 0 alone writes, with every log_steps. Leave it out",
    "logging_nan_inf_filter": "nothing is filtered; log_steps says how often to write. Leave it out",
    "distributed_type": "enable_fsdp",
}

TORCHTUNE = {
    "checkpoint_dir": "model_name",
    "tokenizer.path": "tokenizer_name",
    "max_seq_len": "context_length",
    "lora_rank": "r",
    "lora_attn_modules": "target_modules",
    "apply_lora_to_mlp": "name gate_proj, up_proj and down_proj in target_modules",
    "apply_lora_to_output": "name lm_head in target_modules",
    "quantize_base": "quantization 4bit",
    "recipe_checkpoint": "resume",
    "resume_from_checkpoint": "resume",
    "save_adapter_weights_only": "the result of LoRA is the adapter. Use recipes/export.py --merge for a whole model",
    "enable_async_checkpointing": "save_async",
    "dataset.source": "dataset",
    "data_files": "dataset",
    "dataset.split": "dataset_split",
    "dataset_val": "validation",
    "packed": "batching_strategy packing",
    "train_on_input": "labels all",
    "column_map": RENAME,
    "conversation_column": RENAME,
    "conversation_style": "dataset_format",
    "shuffle": SHUFFLED,
    "batch_size": "batch_size_training",
    "batch_size_val": "val_batch_size",
    "epochs": "num_epochs",
    "max_steps_per_epoch": "use max_train_step, which counts the steps of all epochs",
    "clip_grad_norm": CLIPPING,
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "weight_decay",
    "num_warmup_steps": "warmup_steps",
    "loss": LOSS,
    "num_output_chunks": LOSS,
    "enable_fp8_training": NO_FP8,
    "optimizer_in_bwd": "gradients are kept until the step. Use optimizer AdamW8bit or Adafactor to save memory",
    "run_val_every_n_steps": "eval_steps",
    "enable_activation_checkpointing": "activation_checkpointing full",
    "enable_activation_offloading": "activation_offload",
    "ac_mode": "use activation_checkpointing full, or for selective: every_k with a number, selective with op",
    "ac_option": "activation_checkpointing_k",
    "dtype": "precision",
    "fsdp_reshard_after_forward": "use sharding_strategy FULL_SHARD for true, SHARD_GRAD_OP for false",
    "custom_sharded_layers": "use fsdp_wrap_policy hybrid (the default), which makes units of embedding and head",
    "memory_efficient_fsdp_wrap": "use fsdp_wrap_policy hybrid (the default), which makes units of embedding and head",
    "data_parallel_shard_dim": "sharding_group_size",
    "data_parallel_replicate_dim": REPLICAS,
    "tensor_parallel_dim": PARALLEL,
    "tensor_parallel_plan": PARALLEL,
    "low_cpu_ram": "low_cpu_fsdp",
    "log_every_n_steps": "log_steps",
    "log_peak_memory_stats": "memory peaks are always written to output_dir/metrics.jsonl. Leave it out",
    "metric_logger": REPORTS,
    "profiler.enabled": "use_profiler",
    "profiler.output_dir": "profiler_dir",
    "optimizer._component_": "optimizer",
    "lr_scheduler._component_": "lr_scheduler",
    "model._component_": SAID_BY_CONFIG,
    "checkpointer._component_": SAID_BY_CONFIG,
    "tokenizer._component_": SAID_BY_CONFIG,
    "fp8_recipe_name": NO_FP8,
    "collate_fn": NOTHING,
}

# The same of axolotl.
AXOLOTL_ALONE = """
base_model_config cls_model_config processor_type tokenizer_use_fast peft_layers_to_transform loraplus_lr_ratio relora
lora_mlp_kernel lora_qkv_kernel lora_o_kernel sample_packing_group_size shuffle_merged_datasets cosine_min_lr_ratio
float16 trl
"""

AXOLOTL = TRANSFORMERS | {
    **dict.fromkeys(AXOLOTL_ALONE.split(), NOTHING),
    "base_model": "model_name",
    "tokenizer_config": "tokenizer_name",
    "model_type": SAID_BY_CONFIG,
    "tokenizer_type": "the tokenizer's own files say it. Leave it out",
    "special_tokens": TOKENS,
    "tokens": TOKENS,
    "datasets": "dataset",
    "test_datasets": "validation",
    "val_set_size": "validation",
    "pretraining_dataset": "use dataset, and streaming",
    "dataset_prepared_path": "tokenized rows are always kept, in the cache. LLAMA_FT_CACHE says where it is",
    "dataset_processes": "tokenize_processes",
    "chat_template_jinja": "chat_template",
    "roles_to_train": "labels",
    "train_on_inputs": "labels all",
    "sequence_len": "context_length",
    "excess_length_strategy": "truncation",
    "sample_packing": "batching_strategy packing",
    "eval_sample_packing": "validation rows go the way of batching_strategy. Leave it out",
    "pad_to_sequence_len": "packs are filled and padded by themselves. Leave it out",
    "micro_batch_size": "batch_size_training",
    "eval_batch_size": "val_batch_size",
    "adapter": "lora is use_peft, and qlora is use_peft with quantization 4bit",
    "lora_model_dir": "from_peft_checkpoint",
    "lora_target_linear": "target_modules all-linear",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": "init_lora_weights",
    "unfrozen_parameters": "use freeze_layers and num_freeze_layers",
    "bfloat16": "precision bf16_pure",
    "float32": "precision fp32",
    "fp8": NO_FP8,
    "liger_rope": "use_liger",
    "liger_rms_norm": "use_liger",
    "liger_glu_activation": "use_liger",
    "merge_lora": "use recipes/export.py --merge, after the run",
    "lr_groups": "one lr is for all that is trained. Leave it out",
    "flash_attention": "attn_implementation flash_attention_2",
    "sdp_attention": "attn_implementation sdpa",
    "eager_attention": "attn_implementation eager",
    "dp_shard_size": "sharding_group_size",
    "dp_replicate_size": REPLICAS,
    "context_parallel_size": PARALLEL,
    "sequence_parallel_degree": PARALLEL,
    "tensor_parallel_size": PARALLEL,
    "auto_resume_from_checkpoints": "resume auto",
    "evals_per_epoch": "use eval_steps, a number of optimizer steps; validation is after every epoch too",
    "saves_per_epoch": "use save_steps, a number of optimizer steps; a checkpoint is after every epoch too",
    "mlflow_experiment_name": "mlflow_experiment",
    "mlflow_run_name": "mlflow_name",
    "hf_mlflow_log_artifacts": "mlflow_log_model",
    "profiler_steps": "memory_snapshot",
    "gpu_memory_limit": "use device_memory_fraction, a share of the GPU such as 0.6",
    "rl": "this trains on given answers (supervised fine-tuning) only",
    "added_tokens_overrides": TOKENS,
    "liger_fused_linear_cross_entropy": "the loss is computed in parts anyway; use_liger has the rest. Leave it out",
    "plugins": "use_liger is the one of them that exists",
    "final_state_dict_type": STATE_DICTS,
}

TRAINERS = (
    Trainer("llama-recipes", "docs/from-llama-recipes.md", LLAMA_RECIPES),
    Trainer("torchtune", "docs/from-torchtune.md", TORCHTUNE),
    Trainer("TRL", "docs/from-trl.md", TRL),
    Trainer("axolotl", "docs/from-axolotl.md", AXOLOTL),
)
