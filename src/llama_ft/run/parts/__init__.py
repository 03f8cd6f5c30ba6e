"""What a run does in addition to training, such as uploads: one class and one file each. `run_parts` in
open_run.py lists them."""

from llama_ft.run.parts.part import Part, gather_numbers
