"""Optimizers that torch lacks, on this rank's shards."""
