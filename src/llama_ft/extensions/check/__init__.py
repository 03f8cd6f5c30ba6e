"""Try the machines before a run: `recipes/check.py` measures every rank, the network between them,
the disk of --output_dir and the store of --save_to."""
