"""Trained adapters and models served by vLLM, and the rules of inference servers."""
