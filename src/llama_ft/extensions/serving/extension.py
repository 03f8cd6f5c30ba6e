"""Hands a model or adapter over to an inference server, with `llama-ft export --for SERVER`, and
compares a running one with probes that each run stores, with `llama-ft check --server URL`. A run
with an adapter says at its end how vLLM serves it."""

from llama_ft.door import Extension, ToolFlags

EXTENSION = Extension(
    part=(
        "llama_ft.extensions.serving.probes.part:WriteProbes",
        "llama_ft.extensions.serving.part:ServingLine",
    ),
    needs_part=lambda config: config.checkpoint.save_model,
    tools={
        "check": ToolFlags(
            flags="llama_ft.extensions.serving.probes.check:ServerFlags",
            run="llama_ft.extensions.serving.probes.check:check_server",
            is_used=lambda flags: bool(flags.server or flags.paths or flags.model),
        ),
        "export": ToolFlags(
            flags="llama_ft.extensions.serving.flags:ServingFlags",
            run="llama_ft.extensions.serving.flags:print_command",
            is_used=lambda flags: flags.for_ is not None,
            check="llama_ft.extensions.serving.flags:check_target",
            finish="llama_ft.extensions.serving.flags:finish",
        ),
    },
)
