"""Rollouts as data: rounds of answers with rewards."""

from llama_ft.door import Extension

EXTENSION = Extension()
