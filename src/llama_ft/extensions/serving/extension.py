"""Hands a model or adapter over to an inference server, with `llama-ft export --for SERVER`."""

from llama_ft.door import Extension, ToolFlags

EXTENSION = Extension(
    tools={
        "export": ToolFlags(
            flags="llama_ft.extensions.serving.flags:ServingFlags",
            run="llama_ft.extensions.serving.flags:print_command",
            is_used=lambda flags: flags.for_ is not None,
            check="llama_ft.extensions.serving.flags:check_target",
            finish="llama_ft.extensions.serving.flags:finish",
        )
    },
)
