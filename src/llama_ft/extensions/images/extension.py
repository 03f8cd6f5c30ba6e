"""Samples, prompts and plans may have images, if the model takes them."""

from llama_ft.door import Extension

EXTENSION = Extension(media="llama_ft.extensions.images.reader:ImageReader")
