"""Run a model on fake tensors and count its memory."""
