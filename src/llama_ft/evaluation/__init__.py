"""Evaluation: loss and perplexity of a model on a validation set, and tasks of
lm-evaluation-harness.

Nothing is imported here: `flags` answers a command line without torch.
"""
