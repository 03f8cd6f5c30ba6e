"""Write models and adapters for Transformers and PEFT."""
