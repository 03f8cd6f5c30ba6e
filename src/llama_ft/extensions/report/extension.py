"""Each run writes report.html at its end, and `llama-ft report` writes it again, or compares runs."""

from llama_ft.door import Extension, Verb

EXTENSION = Extension(
    part="llama_ft.extensions.report.part:ReportFacts",
    at_end="llama_ft.extensions.report.write:write_or_warn",
    verbs={
        "report": Verb("report", "Write the HTML report of a run, or compare several."),
        "watch": Verb("watch", "Watch a run in the terminal: progress, cost, losses, memory."),
    },
)
