"""Checkpoints in an object store (--save_to), and on the disks of several nodes."""
