"""Fine-tune open language models with PyTorch FSDP: recipes call what lives here, one folder a step of the path."""

__version__ = "0.1.0"
