"""One fine-tuning with llama_ft and with TRL, step by step: docs/development/trl-comparison.md."""
