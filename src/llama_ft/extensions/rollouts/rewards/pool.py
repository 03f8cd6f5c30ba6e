"""Rewards: functions in users' files that score answers, in processes of their own.

    score(prompt: str, answer: str, sample: dict) -> float | dict[str, float] | None

A call that raises an error, takes too long, ends its process or returns no number gives no reward
(None), never 0. The processes have limits of time and memory. That is not a sandbox: a function
can do whatever its user can.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from llama_ft.config.home import expanded
from llama_ft.config.value_types import parse_size
from llama_ft.config.wording.messages import missing_file
from llama_ft.errors import UserError, plural
from llama_ft.extensions.rollouts.rewards.flags import RewardFlags
from llama_ft.extensions.rollouts.rounds import Reward
from llama_ft.masking import mask_secrets, printable
from llama_ft.processes import cores

REWARD = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)(=(?P<weight>[^=]*))?")
MOST_PROCESSES = 8
LARGEST_REPLY = 2**24  # bytes; a longer one is not from worker.py
IMPORT_SECONDS = 120.0  # for the user's files, which may import large libraries
NO_MEMORY = (
    "MemoryError",
    "failed to map segment",
)  # in errors of imports; the 2nd one is of ld.so
SECONDS_TO_END = 5.0  # after a process has closed its socket
SECONDS_BETWEEN_LOOKS = 0.2  # for processes that have ended, whose forks keep the socket open
# One thread per process: they share the cores, and each thread's stack is address space.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the order of sets is the same in all processes
}
WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from llama_ft.extensions.rollouts.rewards.worker import main; main(int(sys.argv[1]))"
)
# kind of a failure -> what is wrong, for the log
FAILURES = {
    "error": "raised an error",
    "time": "took longer than --reward_timeout {reward_timeout:g} s",
    "cpu": "took more CPU time than --reward_timeout {reward_timeout:g} s",
    "memory": "took more memory than --reward_memory {reward_memory}",
    "crash": "ended its process",
    "value": "returned no finite number",
    "none": "returned None",
}
ENDING = ("time", "cpu", "crash")  # failures whose process must be replaced


class RewardFunction(NamedTuple):
    """A function in a user's file: a value of --reward."""

    file: str
    function: str
    weight: float
    sha256: str  # of the file


class Failure(NamedTuple):
    """Why a function has given no reward for an answer."""

    function: str  # its name in rewards
    kind: str  # one of FAILURES
    text: str


class Scored(NamedTuple):
    """The rewards of an answer.

    Attributes:
        values: of all names; None: the function gave none.
        total: sum of the values times their weights; None if a function gave none.
        failures: of the functions that gave none.
    """

    values: dict[str, float | None]
    total: float | None
    failures: tuple[Failure, ...] = ()

    @property
    def problem(self) -> str:
        """Why there is no reward; "" if nothing is wrong."""
        return "; ".join(f"{failure.function}: {failure.text}" for failure in self.failures)


def parse_reward(text: str) -> RewardFunction:
    """Return the function that a value of --reward names: `path/to/file.py:function`, perhaps with
    `=weight`. Raises UserError if there is no such file."""
    match = REWARD.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--reward {text}: expected path/to/file.py:function, or with a weight file.py:function=0.5."
        )
    weight = 1.0
    if match["weight"] is not None:
        try:
            weight = float(match["weight"])
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise UserError(
                f"--reward {text}: its weight is {match['weight']!r}; expected a number."
            )
    file = expanded(match["file"])
    if not file.is_file():
        raise UserError(f"--reward {text}: {missing_file(file)}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return RewardFunction(match["file"], match["function"], weight, digest)


class _RewardCall(NamedTuple):
    answer: int  # index
    function: int  # index


_Result = dict[str, float] | Failure  # rewards by name, or why there are none


class _Worker:
    """A process that calls the functions, see worker.py. `setup`: what it is sent first."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", WORKER, str(theirs.fileno()), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what functions print must not be in the log
                stderr=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it, and its forks end with it
            )
        self.connection = Connection(ours.detach())
        self.call: _RewardCall | None = None
        self.deadline = 0.0
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. It is lost if the process has ended."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message, default=str).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the process has ended, or if a function has written to the
        socket itself."""
        try:
            message = json.loads(self.connection.recv_bytes(LARGEST_REPLY))
        except (EOFError, OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def imported(self) -> str:
        """Wait until it has imported the functions. Return what is wrong with them."""
        if not self.connection.poll(IMPORT_SECONDS):
            return f"its files could not be imported within {IMPORT_SECONDS:g} s."
        message = self.receive()
        if message is None:
            return f"the import of its files ended the process ({self.how_it_ended()[1]})."
        return str(message["problem"])

    def begin(
        self, call: _RewardCall, answer: tuple[str, str, Mapping[str, Any]], seconds: float
    ) -> None:
        """Send a call, which may take so many seconds."""
        prompt, text, sample = answer
        self.send({"function": call.function, "prompt": prompt, "answer": text, "sample": sample})
        self.call = call
        self.deadline = time.monotonic() + seconds

    def result(self, names: Sequence[str]) -> _Result | None:
        """Return the result of the call; None if there is none yet. `names`: of the functions."""
        assert self.call is not None
        name = names[self.call.function]
        has_ended = self.process.poll() is not None  # before the last look for a message
        if self.connection.poll():
            message = self.receive()
            if message is None:
                return Failure(name, *self.how_it_ended())
            if "kind" in message:
                return Failure(name, message["kind"], message["text"])
            values = message["values"]
            if not isinstance(values, dict):
                return {name: values}
            return {f"{name}.{key}": value for key, value in values.items()}
        if has_ended:
            return Failure(name, *self.how_it_ended())
        if time.monotonic() > self.deadline:
            return Failure(name, "time", "")
        return None

    def how_it_ended(self) -> tuple[str, str]:
        """Return one of FAILURES, and how the process has ended."""
        try:
            code = self.process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return "crash", "it closed its connection"
        if code == -signal.SIGXCPU:
            return "cpu", ""
        return "crash", signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process and its forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class RewardPool:
    """Processes that score answers. The context ends them.

    Args:
        functions: of --reward.
        flags: the limits of the processes.

    Raises:
        UserError: a function does not exist, or its parameters are not prompt, answer and sample.
    """

    def __init__(self, functions: Sequence[RewardFunction], flags: RewardFlags) -> None:
        self._functions = list(functions)
        self._names = _function_names(self._functions)
        self._flags = flags
        memory = flags.reward_memory
        self._setup = {
            "parent": os.getpid(),
            "memory_bytes": parse_size(memory) if memory else 0,
            "cpu_seconds": math.ceil(flags.reward_timeout) + 1,
            "functions": [[str(expanded(one.file)), one.function] for one in self._functions],
        }
        self._most = flags.reward_processes or min(cores(), MOST_PROCESSES)
        self._workers = list[_Worker]()
        self._start(1)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.pop().close()

    def score(
        self,
        answers: Sequence[tuple[str, str, Mapping[str, Any]]],
        look: Callable[[], None] = lambda: None,
    ) -> list[Scored]:
        """Call all functions with all answers.

        Args:
            answers: prompt, answer and sample of each. Functions get the sample as JSON: values of
                other types become text.
            look: called several times per second meanwhile. After an error of it the pool can only
                be closed.

        Returns:
            The rewards, in the order of the answers. All have the same names.

        Raises:
            UserError: a function cannot be imported again, after its process has ended.
        """
        numbers = range(len(self._functions))
        calls = [
            _RewardCall(answer, number) for answer in range(len(answers)) for number in numbers
        ]
        self._start(min(len(calls), self._most))
        waiting = deque(calls)
        results = dict[_RewardCall, _Result]()
        while len(results) < len(calls):
            while waiting and (worker := self._free_worker()) is not None:
                call = waiting.popleft()
                worker.begin(call, answers[call.answer], self._flags.reward_timeout)
            busy = [worker for worker in self._workers if worker.call is not None]
            wait([worker.connection for worker in busy], timeout=SECONDS_BETWEEN_LOOKS)
            look()
            for worker in busy:
                result = worker.result(self._names)
                if result is None or worker.call is None:
                    continue
                results[worker.call] = result
                worker.call = None
                if isinstance(result, Failure) and result.kind in ENDING:
                    self._discard(worker)
        of_answers = [
            [results[_RewardCall(answer, one)] for one in numbers] for answer in range(len(answers))
        ]
        return self._scored(of_answers)

    def rewards(self, scored: Sequence[Scored]) -> list[Reward]:
        """Return what round.json says about each name in what `score` has returned."""
        rewards = list[Reward]()
        for name in scored[0].values if scored else self._names:
            of_function = name if name in self._names else name.rpartition(".")[0]
            one = self._functions[self._names.index(of_function)]
            rewards.append(Reward(name, one.weight, one.file, one.function, one.sha256))
        return rewards

    def describe(self, scored: Sequence[Scored], num_generations: int) -> str:
        """Return lines for the log: the mean rewards of a round, and each kind of failure with its
        first example. `num_generations`: answers per prompt, which are neighbors."""
        totals = [one.total for one in scored if one.total is not None]
        lines = [f"rewards: {len(totals):,} of {plural(len(scored), 'answer')}"]
        if totals:
            lines[0] += f", mean {_mean(totals):.4g}"
            names = scored[0].values
            if len(names) > 1:
                parts = [f"{name} {_mean(_values(scored, name)):.4g}" for name in names]
                lines[0] += f" ({', '.join(parts)})"
        first = dict[tuple[str, str], tuple[int, str]]()
        counts = Counter[tuple[str, str]]()
        for index, one in enumerate(scored):
            for failure in one.failures:
                key = (failure.function, failure.kind)
                counts[key] += 1
                first.setdefault(key, (index, failure.text))
        for (name, kind), count in counts.items():
            index, text = first[name, kind]
            place = f"answer {index % num_generations + 1} to prompt {index // num_generations + 1}"
            what = FAILURES[kind].format(**vars(self._flags))
            example = f" ({printable(mask_secrets(text))})" if text else ""
            lines.append(
                f"  {plural(count, 'answer')} without a reward: {name} {what}; the first: {place}{example}"
            )
        return "\n".join(lines)

    def _start(self, count: int) -> None:
        """Start processes until there are `count`, all at once."""
        started = [_Worker(self._setup) for _ in range(count - len(self._workers))]
        self._workers += started
        for worker in started:
            if problem := worker.imported():
                self.close()
                if any(text in problem for text in NO_MEMORY):
                    problem += f"\n--reward_memory {self._flags.reward_memory} may be too small."
                if "ModuleNotFoundError" in problem:
                    problem += (
                        "\nInstall it. If it is a file of yours, add its directory to PYTHONPATH."
                    )
                raise UserError(f"--reward: {problem}")

    def _free_worker(self) -> _Worker | None:
        """Return a process without a call: a new one if there are too few."""
        for worker in list(self._workers):
            if worker.process.poll() is not None and worker.call is None:
                self._discard(worker)  # it was killed while it had nothing to do
        if len(self._workers) < self._most and all(worker.call for worker in self._workers):
            self._start(len(self._workers) + 1)
        return next((worker for worker in self._workers if worker.call is None), None)

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.close()

    def _scored(self, of_answers: list[list[_Result]]) -> list[Scored]:
        """Return the rewards of answers from the results of all functions, for each answer."""
        columns = dict[str, None]()
        for number, name in enumerate(self._names):
            results = [results[number] for results in of_answers]
            for result in results:
                if not isinstance(result, Failure):
                    columns |= dict.fromkeys(result)
            if all(isinstance(result, Failure) for result in results):
                columns[name] = None
        scored = list[Scored]()
        for results in of_answers:
            values: dict[str, float | None] = dict.fromkeys(columns)
            failures = list[Failure]()
            products = list[float]()
            for one, result in zip(self._functions, results, strict=True):
                if isinstance(result, Failure):
                    failures.append(result)
                    continue
                values |= result
                products += [one.weight * value for value in result.values()]
            total = None if failures else math.fsum(products)
            scored.append(Scored(values, total, tuple(failures)))
        return scored


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _values(scored: Sequence[Scored], name: str) -> list[float]:
    values = [one.values[name] for one in scored]
    return [value for value in values if value is not None]


def _function_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return the names of functions in rewards: `score`, or `style.score` if several files have a
    function of that name."""
    counts = Counter(one.function for one in functions)
    names = list[str]()
    for one in functions:
        is_only = counts[one.function] == 1
        names.append(one.function if is_only else f"{Path(one.file).stem}.{one.function}")
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise UserError(
            f"--reward: two functions have the name {twice}. Leave one out, or rename one of the files."
        )
    return names
