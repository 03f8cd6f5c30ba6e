"""Scripts that print one table each, a folder per subject. golden.py compares two checkouts, record.py
keeps what benchmarks print, gpu_check.py checks one GPU."""
