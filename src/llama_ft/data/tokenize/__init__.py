"""Turn samples into tokens and loss masks."""
