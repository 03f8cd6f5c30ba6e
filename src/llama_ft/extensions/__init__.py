"""Capabilities that a run or a tool can have and that the core does not know: one folder each, with
an `extension.py` that says what it brings. llama_ft/door.py has their names."""
