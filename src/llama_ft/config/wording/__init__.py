"""How settings are named and described in messages."""
