"""Check the machines before a run: start it with torchrun exactly as you will start the training.

It measures each rank (device, free memory, matmul rate), the network between ranks and nodes, the
disk of --output_dir, and with --save_to an object store. It prints a table and names what is odd.
The exit code is 1 if something is.
With --server URL it only compares a running server with what RUN has trained.
"""

import sys

from llama_ft import door
from llama_ft.config.home import expanded
from llama_ft.errors import before_imports
from llama_ft.extensions.check.flags import CheckFlags, read_check_flags

if __name__ == "__main__":
    with before_imports():
        OPTIONS = read_check_flags(sys.argv[1:], str(__doc__))
        for check in door.functions_of("check", OPTIONS):  # a flag of an extension: only that
            check(OPTIONS)
            sys.exit(0)

from llama_ft import runtime  # noqa: E402
from llama_ft.config import parse_duration  # noqa: E402
from llama_ft.errors import RunFailure  # noqa: E402
from llama_ft.extensions.check.disk import try_disk  # noqa: E402
from llama_ft.extensions.check.machine import measure_rank  # noqa: E402
from llama_ft.extensions.check.network import measure_network  # noqa: E402
from llama_ft.extensions.check.result import CheckResult  # noqa: E402
from llama_ft.runtime import log  # noqa: E402


def main(options: CheckFlags) -> None:
    """Measure, and print what was found."""
    seconds = parse_duration(options.collective_timeout)
    with runtime.start(options.device, "world", timeout_seconds=seconds) as ranks:
        nbytes = options.megabytes * 2**20
        facts = ranks.gather(measure_rank(ranks))
        links = measure_network(ranks, [rank.node for rank in facts], nbytes)
        folder = expanded(options.output_dir)
        disks = ranks.gather(try_disk(ranks, folder, nbytes))
        trials = ranks.gather(door.trials(options))  # --save_to
        result = CheckResult(options.output_dir, facts, disks, links, trials)
        log.info(result.table())
        problems = result.problems()
        if problems:
            raise RunFailure(*problems)
        log.info("No problem was found.")


if __name__ == "__main__":
    main(OPTIONS)
