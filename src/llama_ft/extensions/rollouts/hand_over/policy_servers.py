"""Servers that answer during reinforcement learning, each time with the newest adapter.

    rollouts/policy-000005-5f0c21ab/     the adapter for round 5, which servers load under a new name
    rollouts/000005/                     the answers that they sample with it

A server never gets other weights under a known name, whose keys and values it may have cached. The
directory and the server's copy of an adapter are deleted when the next one is in use.

With --staleness 1 the adapter for round 5 is that before step 4, and servers answer while step 4 is
trained:

    step 3         | step 4         | step 5
    round 4 by 2   | round 5 by 3   | round 6 by 4        (by the weights after a step)
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from llama_ft.config import parse_duration
from llama_ft.errors import UserError, reason
from llama_ft.export import export_policy
from llama_ft.extensions.rollouts.hand_over.background import BackgroundTask
from llama_ft.extensions.rollouts.hand_over.flags import PolicyServerFlags
from llama_ft.extensions.rollouts.hand_over.lora_server import LoraServer
from llama_ft.extensions.rollouts.hand_over.probe import (
    STRENGTHS,
    ProbeAnswer,
    Scorer,
    canary,
    compare,
    has_clear_effect,
    judge_canary,
    judge_version,
)
from llama_ft.extensions.rollouts.policy import trained_checksum
from llama_ft.extensions.rollouts.rounds import (
    Answer,
    Prompt,
    Round,
    RoundFacts,
    list_rounds,
    rollouts_of,
    sha256_of,
    write_unscored,
)
from llama_ft.extensions.rollouts.sampling import Sampling, SamplingStopped
from llama_ft.extensions.rollouts.servers import ServerRequests, ServerSampler
from llama_ft.inference.verdict import Compared
from llama_ft.models import BuiltModel, without_graphs
from llama_ft.runtime import Ranks, Stopped, log

T = TypeVar("T")
POLICY = "policy-"
POLICY_FILE = "policy.json"
PROBE_ANSWERS = 8
PROBE_TOKENS = 32  # of an answer, at most
DIGITS = 8  # of a checksum, in names
WAY_OUT = "The rounds so far are on disk. Once this is repaired, the same command with --resume auto continues."


class LostAdapter(UserError):
    """A server had an adapter and does not list it any more."""


class Published(NamedTuple):
    """An adapter that servers have.

    Attributes:
        name: theirs for it.
        folder: from which they have loaded it.
        checksum: of the policy, as in round.json.
    """

    name: str
    folder: Path
    checksum: str = ""


class PolicyServers:
    """The servers of a run. All ranks have one and call its methods together; rank 0 talks to the
    servers.

    Args:
        settings: the servers, and how they are asked.
        tokenizer: of the model.
        ranks: the ranks.

    Attributes:
        urls: of the servers.
        context: the positions of the server with the fewest; None if they do not tell.
        source: what round.json says about the servers.

    Raises:
        UserError: a server does not answer.
    """

    def __init__(
        self, settings: PolicyServerFlags, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._seconds = parse_duration(settings.server_timeout)
        self._servers = [LoraServer(url, self._seconds) for url in settings.server]
        self._directory = Path()
        self._places = list[Path]()
        self.urls = [server.url for server in self._servers]
        self._prompts = list[Prompt]()
        self._current: Published | None = None
        self._is_comparable = True  # the trainer has the weights of the current adapter
        self._is_proven = False
        self._ahead: BackgroundTask[bool] | None = None  # the answers of the next round
        self._round_sampler: ServerSampler | None = None  # of the answers of a round
        self._is_closed = False
        self.context: int | None = ranks.broadcast_from_rank0(self._find_context)
        # The adapter is the round's policy, and has no other name there.
        self.source: dict[str, Any] = ranks.broadcast_from_rank0(self._describe)

    def open(self, places: Sequence[Path], prompts: Sequence[Prompt]) -> None:
        """Begin a run with these prompts, and delete what a killed run has left. `places`: its
        directory, and those of the runs that it continues."""
        self._places = list(places)
        self._directory = places[0].resolve()
        self._prompts = list(prompts[:PROBE_ANSWERS])
        rollouts = rollouts_of(self._directory)
        for folder in rollouts.glob(f"{POLICY}*"):
            if not self._settings.staleness:  # else the next round may need it
                self._delete(Published(self._name_of(folder), folder))
        if self._ranks.is_main:
            for folder in rollouts.glob(f".*{POLICY}*"):  # incomplete
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, scorer: Scorer, sampling: Sampling, facts: RoundFacts) -> Published:
        """Let all servers load the adapter for a round, and prove that they apply it. The first time,
        an adapter whose effect is large proves that they can. The model is in evaluation mode.

        Raises:
            UserError: a server cannot load it, or answers with other weights.
        """
        if not self._is_proven:
            self._prove(scorer, sampling)
            self._is_proven = True
        checksum = facts.policy["checksum"]
        published = self._load(scorer.built, f"{facts.step:06}", checksum)
        self._is_comparable = True
        self._check_version(scorer, sampling)
        self._delete_others(published)
        return published

    def find(self, number: int) -> Published | None:
        """Return the adapter of a round that is on disk; all ranks get what rank 0 finds."""
        return self._ranks.broadcast_from_rank0(partial(self._find, number))

    def publish_again(self, scorer: Scorer, sampling: Sampling, published: Published) -> None:
        """Let all servers load an adapter of earlier weights than the present ones, which therefore
        cannot be compared with it."""
        if not self._is_proven:
            self._prove(scorer, sampling)
            self._is_proven = True
        self._current = published
        self._wait_for(partial(self._send, published))
        self._is_comparable = False
        self._delete_others(published)

    def begin(self, sampling: Sampling, prompts: list[Prompt], facts: RoundFacts) -> None:
        """Begin to sample a round with the adapter that was published last, while the ranks train.
        `finish` waits for its answers."""

        def sample() -> bool:
            answers = self._ask_or_miss(sampling, prompts, facts.step)
            if answers is not None and not self._is_closed:
                write_unscored(self._directory, Round(facts, prompts, answers))
            return answers is not None

        self._ahead = self._start(sample)

    def finish(self) -> None:
        """Wait for the answers of `begin`, which are then on disk, unless a server has lost the
        adapter. Raises UserError if a server fails."""
        if self._ahead is not None:
            self._result_of(self._ahead, [])
            self._ahead = None

    def sample(
        self,
        scorer: Scorer,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        step: int,
        begun: Sequence[list[Answer]] = (),
    ) -> list[list[Answer]]:
        """Return the answers to each prompt of a round, by the adapter that was published last. If a
        server was restarted meanwhile, it gets the adapter again, once.

        Raises:
            UserError: a server fails, or its answer lacks what is needed.
            SamplingStopped: a signal has asked to stop.
        """
        ask = partial(self._ask_or_miss, sampling, prompts, step, begun)
        answers = self._result_of(self._start(ask), begun)
        if answers is None:
            self._send_again(scorer, sampling)
            again = partial(self._ask, sampling, prompts, step, begun)
            answers = self._result_of(self._start(again), begun)
        return answers

    def _start(self, ask: Callable[[], T]) -> BackgroundTask[T]:
        """Begin a function that asks servers, on rank 0. Its errors say how the run continues."""

        def ask_or_advise() -> T:
            try:
                return ask()
            except UserError as error:
                raise self._advised(*error.messages) from error

        return BackgroundTask(self._ranks, ask_or_advise)

    def _advised(self, *messages: str) -> UserError:
        """Return an error that says how the run continues, if it has rounds."""
        *others, last = messages
        has_rounds = bool(list_rounds(self._directory))
        return UserError(*others, f"{last}\n{WAY_OUT}" if has_rounds else last)

    def _wait_for(self, ask: Callable[[], T]) -> T:
        """Return what a function returns that asks servers, on rank 0. Raises Stopped at a signal,
        which does not wait for the servers."""
        return self._start(ask).result()

    def _result_of(self, task: BackgroundTask[T], begun: Sequence[list[Answer]]) -> T:
        """Return what a task of `_ask` returns. `begun`: the answers that it was given."""
        try:
            return task.result()
        except Stopped as stopped:
            sampling_stopped = SamplingStopped(stopped)
            if self._round_sampler is not None:
                sampling_stopped.answers = [*begun, *self._round_sampler.answers_so_far()]
            raise sampling_stopped from stopped

    def close(self, keeps_files: bool) -> None:
        """Delete the adapter at the servers. `keeps_files`: not here; a resumed run needs it."""
        self._is_closed = not keeps_files
        if self._current is not None:
            self._delete(self._current, keeps_files and self._settings.staleness > 0)
        self._current = None
        if not keeps_files:  # nor what a killed run has left
            for folder in rollouts_of(self._directory).glob(f"{POLICY}*"):
                self._delete(Published(self._name_of(folder), folder))

    def _find(self, number: int) -> Published | None:
        """Return the adapter of a round that is on disk, in the run's directory afterwards."""
        for place in self._places:
            for source in rollouts_of(place).glob(f"{POLICY}{number:06}-*"):
                folder = rollouts_of(self._directory) / source.name
                try:
                    if not folder.is_dir():
                        aside = folder.with_name(f".{folder.name}.tmp")
                        shutil.copytree(source, aside, dirs_exist_ok=True)
                        aside.rename(folder)
                    checksum = _read_checksum(folder)
                except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                    raise UserError(
                        f"{source}: is corrupted ({reason(error)}).\n"
                        "It has the weights that sample the next round. Resume from an earlier checkpoint."
                    ) from error
                return Published(self._name_of(folder), folder, checksum)
        return None

    def _find_context(self) -> int | None:
        limits = [server.context() for server in self._servers]
        return min((limit for limit in limits if limit is not None), default=None)

    def _describe(self) -> dict[str, Any]:
        versions = {server.version() for server in self._servers}
        return {"kind": "server", "version": ", ".join(sorted(versions))}

    def _name_of(self, folder: Path) -> str:
        return f"{self._directory.name}-{folder.name}"

    def _load(self, built: BuiltModel, number: str, checksum: str) -> Published:
        """Write the adapter and let all servers load it."""
        # the directory's name, too: two runs may have equal weights, and each deletes its own
        text = f"{self._directory} {checksum}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
        folder = rollouts_of(self._directory) / f"{POLICY}{number}-{digest}"
        published = Published(self._name_of(folder), folder, checksum)

        def finish(aside: Path) -> None:
            files = {path.name: sha256_of(path) for path in sorted(aside.iterdir())}
            content = json.dumps({"checksum": checksum, "files": files})
            (aside / POLICY_FILE).write_text(content + "\n")

        export_policy(built, folder, self._ranks, finish)
        self._current = published  # also if a signal comes: `close` deletes it
        self._wait_for(partial(self._send, published))
        return published

    def _send(self, published: Published) -> None:
        for server in self._servers:
            server.load(published.name, published.folder)

    def _send_again(self, scorer: Scorer, sampling: Sampling) -> None:
        assert self._current is not None
        log.warning(
            f"--server: {self._current.name} is gone: a server was restarted, or has unloaded it. It is loaded again."
        )
        self._wait_for(partial(self._send, self._current))
        if self._is_comparable:
            self._check_version(scorer, sampling)

    def _delete_others(self, published: Published) -> None:
        for folder in rollouts_of(self._directory).glob(f"{POLICY}*"):
            if folder != published.folder:
                self._delete(Published(self._name_of(folder), folder))

    def _delete(self, published: Published, keeps_files: bool = False) -> None:
        if not self._ranks.is_main:
            return
        for server in self._servers:
            server.unload(published.name)
        if not keeps_files:
            shutil.rmtree(published.folder, ignore_errors=True)

    def _prove(self, scorer: Scorer, sampling: Sampling) -> None:
        """Let all servers load an adapter of random numbers, with the present matrices A, which its
        name identifies. Raises UserError if one does not apply it."""
        checksum = trained_checksum(scorer.built, self._ranks)
        for strength in STRENGTHS:
            with canary(scorer.built, strength):
                published = self._load(scorer.built, "canary", f"{checksum} {strength}")
                probed = self._probe(scorer, sampling, published)
            self._delete(published)
            if all(has_clear_effect(numbers) for numbers in probed.values()):
                break
        self._raise_problems(
            {url: judge_canary(probed[url], scorer.quantization) for url in probed}
        )
        log.info(f"{', '.join(probed)}: a probe proves that adapters are applied.")

    def _check_version(self, scorer: Scorer, sampling: Sampling) -> None:
        """Raise UserError if a server does not answer with the published adapter."""
        assert self._current is not None
        problems = dict[str, str]()
        for seed in (sampling.seed, sampling.seed + 1):  # few tokens can be misleading once
            how = replace(sampling, seed=seed)
            probed = self._probe(scorer, how, self._current)
            problems = {url: judge_version(probed[url], scorer.quantization) for url in probed}
            if not any(problems.values()):
                break
        self._raise_problems(problems)

    def _raise_problems(self, problems: dict[str, str]) -> None:
        """Raise a UserError with what is wrong with each server, if something is."""
        messages = [f"--server {url}: {problem}" for url, problem in problems.items() if problem]
        if messages:
            raise self._advised(*messages)

    def _probe(
        self, scorer: Scorer, sampling: Sampling, published: Published
    ) -> dict[str, list[Compared]]:
        """Let each server answer the same prompts, and return its log-probabilities next to those of
        the trainer."""
        ask = partial(self._ask_probes, sampling, published)
        answers = self._wait_for(ask)
        with without_graphs(scorer.built.model):
            return {url: compare(scorer, answered) for url, answered in answers.items()}

    def _ask_probes(self, sampling: Sampling, published: Published) -> dict[str, list[ProbeAnswer]]:
        how = replace(
            sampling,
            num_generations=math.ceil(PROBE_ANSWERS / len(self._prompts)),
            max_completion_length=min(PROBE_TOKENS, sampling.max_completion_length),
        )
        answers = {}
        for server in self._servers:
            sampler = self._sampler([server.url], how, published)
            with self._losses_named():
                # rounds have other numbers, so other seeds
                groups = sampler.sample(self._prompts, step=0)
            answers[server.url] = [
                ProbeAnswer(prompt, answer)
                for prompt, group in zip(self._prompts, groups, strict=True)
                for answer in group
            ]
        return answers

    def _ask_or_miss(
        self,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        step: int,
        begun: Sequence[list[Answer]] = (),
    ) -> list[list[Answer]] | None:
        """Return the answers to each prompt; None if a server has lost the adapter."""
        try:
            return self._ask(sampling, prompts, step, begun)
        except LostAdapter:
            return None

    def _ask(
        self,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        step: int,
        begun: Sequence[list[Answer]],
    ) -> list[list[Answer]]:
        assert self._current is not None
        with self._losses_named():
            self._round_sampler = self._sampler(self.urls, sampling, self._current)
            return self._round_sampler.sample(prompts, step, begun)

    @contextmanager
    def _losses_named(self) -> Iterator[None]:
        """Raise LostAdapter for an error in the block if a server has lost the adapter."""
        try:
            yield
        except UserError as error:
            assert self._current is not None
            name = self._current.name
            lost = [server.url for server in self._servers if not server.has(name)]
            if not lost:
                raise
            raise LostAdapter(
                *[
                    f"--server {url}: has lost the adapter {name}: the server was restarted, or another "
                    "program has unloaded it."
                    for url in lost
                ]
            ) from error

    def _sampler(self, urls: list[str], sampling: Sampling, published: Published) -> ServerSampler:
        at_once = self._settings.server_requests
        requests = ServerRequests(urls, published.name, self._seconds, at_once)
        return ServerSampler(requests, sampling, self._tokenizer)


class PolicySampler:
    """Samples with servers that get the adapter first. See `Sampler`.

    Args:
        servers: of the run.
        scorer: computes with the weights that are handed over.
        sampling: how answers are sampled.
        facts: of the round.
    """

    def __init__(
        self, servers: PolicyServers, scorer: Scorer, sampling: Sampling, facts: RoundFacts
    ) -> None:
        self._servers = servers
        self._scorer = scorer
        self._sampling = sampling
        self._facts = facts
        self.source = servers.source

    def sample(
        self, prompts: Sequence[Prompt], step: int, begun: Sequence[list[Answer]] = ()
    ) -> list[list[Answer]]:
        """See `Sampler`."""
        # with --staleness 1, of earlier weights
        held = self._servers.find(step)
        if held is None:
            self._servers.publish(self._scorer, self._sampling, self._facts)
        else:
            self._servers.publish_again(self._scorer, self._sampling, held)
        return self._servers.sample(self._scorer, self._sampling, prompts, step, begun)


def _read_checksum(folder: Path) -> str:
    """Return the checksum of the policy whose adapter is in a directory. Raises ValueError and others
    if it is not as it was written."""
    content = json.loads((folder / POLICY_FILE).read_text())
    for name, expected in content["files"].items():
        if sha256_of(folder / name) != expected:
            raise ValueError(f"the checksum of {name} differs")
    checksum: str = content["checksum"]
    return checksum
