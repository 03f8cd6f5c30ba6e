"""What several benchmarks use: files, launches, memory of processes, a local object store."""
