"""Hand a model or adapter over to an inference server: what it reads, what it ignores, and files in
its own format; and check what a running server answers."""
