"""LoRA and other adapters: layers, names and saved files."""
