"""The checks of gpu_check.py, which runs on one GPU."""
