"""What the other folders of models build on: stored tensors, shards of weights, layers, and what Transformers lacks."""
