"""How layers compute: chunked loss, fused and compiled layers, checkpointed activations."""
