"""Private names of Liger Kernel (seen in 0.8.5), datasets (5.2.0) and safetensors (0.8.0)."""

# (owner, what needs it) -> names. A function has the parameters that are passed here.
LIGER_NAMES = {
    ("transformers.monkey_patch", "use_liger"): (
        "_apply_liger_kernel_to_instance(model) MODEL_TYPE_TO_APPLY_LIGER_FN"
    )
}
# What a dataset was made from: a part of the key of the cache of tokenized samples.
DATASETS_NAMES = {("Dataset", "the cache of tokenized samples"): "_fingerprint"}
SAFETENSORS_NAMES = {("torch", "reading checkpoints"): "_TYPES"}
