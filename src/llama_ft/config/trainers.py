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

LLAMA_RECIPES = {
    "one_gpu": "a run without torchrun is one process on one device. Leave it out",
    "pure_bf16": "use precision bf16_pure",
    "mixed_precision": "use precision bf16_mixed (the default) or fp32",
    "use_fp16": "use precision bf16_mixed (the default), or fp16 on GPUs without bf16",
    "use_fast_kernels": "use attn_implementation; sdpa, which auto takes, has torch's fastest kernels",
    "hsdp": "use sharding_strategy HYBRID_SHARD",
    "replica_group_size": REPLICAS,
    "checkpoint_type": "checkpoints are always sharded, and the result is in Hugging Face format. Leave it out",
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
    "state_dict_type": "checkpoints are always sharded, and the result is in Hugging Face format. Leave it out",
}

TRL = TRANSFORMERS | {
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
    "ac_mode": "use activation_checkpointing full, or every_k for selective with a number",
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
}

AXOLOTL = TRANSFORMERS | {
    "base_model": "model_name",
    "tokenizer_config": "tokenizer_name",
    "model_type": "config.json says it. Leave it out",
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
}

TRAINERS = (
    Trainer("llama-recipes", "docs/from-llama-recipes.md", LLAMA_RECIPES),
    Trainer("torchtune", "docs/from-torchtune.md", TORCHTUNE),
    Trainer("TRL", "docs/from-trl.md", TRL),
    Trainer("axolotl", "docs/from-axolotl.md", AXOLOTL),
)
