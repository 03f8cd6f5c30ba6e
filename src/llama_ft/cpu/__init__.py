"""Ways to compute that are for CPUs only."""
