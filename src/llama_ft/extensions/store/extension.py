"""Runs with --save_to upload to an object store, and --resume continues from there on any disk."""

from llama_ft.door import Extension

EXTENSION = Extension(
    remote_run="llama_ft.extensions.store.remote:RunInStore",
    needs_remote_run=lambda settings: (
        settings.save_to is not None or "://" in (settings.resume or "")
    ),
    trial="llama_ft.extensions.store.trial:try_store",
)
