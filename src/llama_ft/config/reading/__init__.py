"""Read the command line and YAML, and say what is wrong in them."""
