"""What a run will cost, before it starts: its own code on fake tensors, one rank of as many as are asked for.

Nothing is imported here: `flags` answers a command line without torch.
"""
