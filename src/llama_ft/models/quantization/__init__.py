"""Quantized linear layers and experts: which ones, and how they compute."""
