"""`llama-ft check` measures the machines before a run."""

from llama_ft.door import Extension, Verb

EXTENSION = Extension(
    verbs={
        "check": Verb(
            "check",
            "Measure devices, network and disk before a run. --nproc N: on N processes.",
            takes_nproc=True,
        )
    }
)
