"""The families of Transformers, one small model each: docs/reference/model-support.md."""
