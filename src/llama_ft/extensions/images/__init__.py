"""Samples with images."""
