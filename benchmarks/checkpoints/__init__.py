"""Checkpoints and object stores: their cost, and runs that are killed, overlap or get wrong answers."""
