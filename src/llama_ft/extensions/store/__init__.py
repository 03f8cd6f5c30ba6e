"""Checkpoints and results of a run in an object store, for --save_to and --resume URL."""
