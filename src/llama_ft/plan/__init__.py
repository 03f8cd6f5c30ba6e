"""Predict the memory of a run before it starts: its own code runs on fake tensors, as one rank of
the requested number.

Nothing is imported here: `flags` answers a command line without torch.
"""
