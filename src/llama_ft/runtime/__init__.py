"""Processes and devices: the process group, the device mesh, rank 0's log, and how a run stops or
fails."""

from llama_ft.runtime.console import configure_console, console, log, log_off, set_quiet
from llama_ft.runtime.devices import PRECISIONS, Precision, advise_precision, sent
from llama_ft.runtime.ends.exit import Stopped
from llama_ft.runtime.process_group import Ranks, start
from llama_ft.runtime.target import Target, computing_on, current_target
