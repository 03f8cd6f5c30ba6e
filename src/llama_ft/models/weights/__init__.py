"""Load weights into a sharded model."""
