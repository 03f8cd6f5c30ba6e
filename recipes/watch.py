"""Watch a run in the terminal: progress, time of the end, cost, losses, speed, memory, answers.

RUN is the directory of a run; without it, the newest run in output/ is shown. Only its files are
read, so it may train on another machine that shares the disk. Ctrl-C ends the watch and not the run.
Without a terminal, the run is printed once.
"""

import io
import sys

from llama_ft.config.home import expanded
from llama_ft.errors import exit_on_error
from llama_ft.extensions.report.run import corrupted_files_explained
from llama_ft.extensions.report.watch import WatchFlags, read_watch_flags, watch


def main(options: WatchFlags) -> None:
    """Show the run until it ends."""
    try:
        with corrupted_files_explained(options.paths):
            watch(expanded(options.paths[0]), options)
    except KeyboardInterrupt:
        print(f"The run continues: llama-ft watch {options.paths[0]}")


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for any locale
    with exit_on_error():
        main(read_watch_flags(sys.argv[1:], str(__doc__)))
