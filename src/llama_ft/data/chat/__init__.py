"""Chat templates, and which tokens of a chat are in the loss."""
