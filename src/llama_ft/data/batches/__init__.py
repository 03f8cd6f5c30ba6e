"""Pack samples, and plan and make the micro-batches of all steps."""
