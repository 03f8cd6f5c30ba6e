"""Shard a model with FSDP, and choose its dtypes."""
