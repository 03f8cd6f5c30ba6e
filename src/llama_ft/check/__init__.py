"""Try the machines before a run: `recipes/check.py` measures every rank, the network between them
and the disk of --output_dir."""
