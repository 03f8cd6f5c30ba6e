"""A tuned model in use: loaded from whatever a run has left, and asked.

Nothing is imported here: `flags` answers a command line without torch.
"""
