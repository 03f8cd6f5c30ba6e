"""How good a model is: its loss on rows that it was not trained on, and tasks of lm-evaluation-harness.

Nothing is imported here: `flags` answers a command line without torch.
"""
