"""Probes: a run stores log-probabilities of a few prompts, and `check --server` compares a running
server with them."""
