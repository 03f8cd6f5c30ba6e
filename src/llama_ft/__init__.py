"""Fine-tune open language models with PyTorch FSDP. Each folder is one part of a run; recipes/
combine them."""

__version__ = "0.2.0"
