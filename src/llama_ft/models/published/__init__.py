"""Read checkpoints that were published quantized."""
