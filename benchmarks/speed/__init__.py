"""Time and memory of the parts of a run: start, data, loading, and what each optimization gives."""
