"""Towers of models that take images: what is trained of them, and how they run."""
