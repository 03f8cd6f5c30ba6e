"""Private names of torch, seen in 2.11 to 2.15. models/base/torch_2_11.py replaces what torch 2.11
lacks."""

SHARDED = "distributed.fsdp._fully_shard"
# (owner, what needs it) -> names. A function has the parameters that are passed here.
NAMES = {
    # One kernel for many tensors. torch's optimizers and clip_grad_norm_ use them.
    ("", "gradient clipping"): "_foreach_norm _foreach_mul_ _foreach_div_",
    ("", "the exchange of data-parallel gradients"): "_foreach_copy_",
    # The older name of functional.grouped_mm: Transformers' experts call one of them.
    ("", "LoRA on experts"): "_grouped_mm",
    ("", "attention on the CPU"): "_softmax_backward_data",
    # Operators without a public function.
    ("ops.aten", "kernels that return a new tensor"): "_unsafe_view",
    ("ops.aten", "packed attention"): (
        "_efficient_attention_forward _efficient_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    ("ops.torch_attn", "attention with sinks on GPUs"): "_varlen_attn_backward",
    ("ops.aten", "plans of padded batches for GPUs"): "_scaled_dot_product_efficient_attention",
    ("ops.aten", "the plan of a model's memory"): "_local_scalar_dense _grouped_mm",
    ("ops.aten.mm.default", "the plan of a model's memory"): "_opname _schema",
    # Hooks for saved tensors do not nest: those of activation checkpointing are called from ours.
    ("_C._autograd", "quantized experts"): "_top_saved_tensors_default_hooks",
    # Identity of a storage: two views of one tensor have the same.
    ("UntypedStorage", "quantized experts and memory reports"): "_cdata",
    # autograd's counter of in-place writes: whether a function has filled a tensor
    ("Tensor", "the first values of buffers and adapters"): "_version",
    # The local shard, without a collective or a detach.
    ("distributed.tensor.DTensor", "memory reports"): "_local_tensor",
    # Dictionaries of a module: public methods would call hooks, rename, or check the class.
    ("nn.Module", "the exchange of layers"): (
        "_parameters _modules _buffers _non_persistent_buffers_set"
    ),
    ("nn.modules.conv", "quantization, to leave convolutions as they are,"): "_ConvNd",
    ("autograd.Function", "the chunked loss"): "_backward_cls",
    ("optim.AdamW", "AdamW"): "_init_group",
    ("_dynamo", "compiled layers"): "config",
    ("_dynamo.utils", "the count of compiled graphs"): "counters",
    ("utils._pytree", "LoRA on experts"): "tree_map(func, tree)",
    ("distributed.distributed_c10d", "the process group"): (
        "_get_default_store() _set_pg_timeout(timeout, group)"
    ),
    ("distributed.ProcessGroup", "the report of a rank that hangs"): (
        "_get_sequence_number_for_group"
    ),
    ("_C", "expandable segments"): "_accelerator_setAllocatorSettings",
    ("cuda.memory", "memory snapshots"): (
        "_record_memory_history(max_entries) _dump_snapshot(filename)"
    ),
    # fully_shard: a plan counts what these allocate, and runs without processes or data.
    ("_subclasses.fake_tensor", "the plan of a model's memory"): (
        "FakeTensor FakeTensorMode unset_fake_temporarily()"
    ),
    ("utils._python_dispatch", "the plan of a model's memory"): (
        "TorchDispatchMode _disable_current_modes()"
    ),
    ("distributed.tensor._sharding_prop", "the plan of a model's memory"): "ShardingPropagator",
    ("distributed.tensor._sharding_prop.ShardingPropagator", "the plan of a model's memory"): (
        "_propagate_tensor_meta_non_cached(op_schema)"
    ),
    (f"{SHARDED}._fsdp_param_group", "the plan of a model's memory"): (
        "foreach_all_gather foreach_all_gather_copy_out foreach_reduce"
    ),
    (f"{SHARDED}._fsdp_param", "sharded integers"): "FSDPParam",
    (f"{SHARDED}._fsdp_param.FSDPParam", "sharded integers"): "init_dtype_attrs(mp_policy)",
    ("testing._internal.distributed.fake_pg", "the plan of a model's memory"): "FakeStore",
}
