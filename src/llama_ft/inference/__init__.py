"""Use a fine-tuned model: load whatever a run has written, and generate answers.

Nothing is imported here: `flags` answers a command line without torch.
"""
