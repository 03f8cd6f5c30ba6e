"""Evaluation: a model's loss and perplexity on a validation set, and tasks of lm-evaluation-harness.

Nothing is imported here: `flags` answers a command line without torch.
"""
