"""The rounds of a run with --objective grpo: sampled by the model before each step, or found on disk.

    RUN/rollouts/000001/    the answers of step 1, by the weights before it

With --num_iterations 2, round 1 is of steps 1 and 2, by the weights before step 1, and so on.
A run that was killed resumes from its newest checkpoint. The rounds of the steps after it are on disk
and are read: no complete round is generated twice, and the run has the bytes of one that was never
killed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from llama_ft.checkpoint.run_directory import set_aside
from llama_ft.config import Config
from llama_ft.data import BatchLayout, StepBatches, stop_token_ids
from llama_ft.errors import UserError, plural
from llama_ft.extensions.rollouts.flags import check_urls
from llama_ft.extensions.rollouts.grpo.batches import RoundStep
from llama_ft.extensions.rollouts.grpo.held_out import STEP, held_out_prompts, reward_sums
from llama_ft.extensions.rollouts.grpo.mismatch import MismatchMetrics
from llama_ft.extensions.rollouts.grpo.objective import Grpo
from llama_ft.extensions.rollouts.grpo.old_logprobs import OldLogprobs
from llama_ft.extensions.rollouts.grpo.settings import GrpoConfig
from llama_ft.extensions.rollouts.grpo.shown_answers import keep_for_report, kept_for_report
from llama_ft.extensions.rollouts.hand_over.adapter_rules import find_problems
from llama_ft.extensions.rollouts.hand_over.policy_servers import (
    PolicySampler,
    PolicyServers,
)
from llama_ft.extensions.rollouts.hand_over.probe import Scorer
from llama_ft.extensions.rollouts.make_rounds import (
    RoundMaker,
    describe,
    kept_if_stopped,
    sampling_facts,
)
from llama_ft.extensions.rollouts.policy import PolicyFiles, checksum_of, trained_checksum
from llama_ft.extensions.rollouts.prompts import PromptTokens, read_dataset
from llama_ft.extensions.rollouts.resume import check_round
from llama_ft.extensions.rollouts.rewards.pool import RewardPool, parse_reward
from llama_ft.extensions.rollouts.rounds import (
    Answer,
    Prompt,
    Round,
    RoundFacts,
    begun_folder_of,
    folder_of,
    list_rounds,
    read_round,
    unscored_folder_of,
    write_round,
)
from llama_ft.extensions.rollouts.sampling import OwnSampler, Sampler, Sampling, positions
from llama_ft.inference.load import LoadedModel
from llama_ft.models import BuiltModel, resolve_context_length
from llama_ft.run import Part, RunInputs, Setup, TrainingRun
from llama_ft.runtime import log
from llama_ft.runtime.rank0 import on_rank0
from llama_ft.training import StepOutcome
from llama_ft.training.evaluation import LossSums, evaluating

SECONDS = "perf/rollout_seconds"
KEEP_REWARDS = "If only the rewards differ, --resume_allow_changes reward continues, and complete rounds keep theirs."
# settings that a resumed run may change
MAY_DIFFER = (
    "reward",  # compared with that of the rounds
    "reward_timeout",
    "reward_memory",
    "reward_processes",
    "generate_batch_size",
    "num_generations_eval",
    "max_generated_tokens",
    "server",
    "server_timeout",
    "server_requests",
)


class TrainingRounds(Part):
    """Has the round of each step for the objective, and logs its numbers.

    Args:
        setup: what is known before the run.
        inputs: the result of `resolve_inputs`.

    Attributes:
        layout: of micro-batches.
        old: log-probabilities for the weights that have sampled the round.

    Raises:
        UserError: settings or prompts do not fit, or a reward function cannot be imported.
    """

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        config = inputs.config
        self._config = config
        self._settings = config.section(GrpoConfig)
        self._ranks = setup.ranks
        self._memory = setup.memory
        self.layout: BatchLayout = inputs.batches.layout
        self._tokenizer = inputs.tokenizer
        check(setup, inputs)
        self._functions = [parse_reward(text) for text in self._settings.reward]
        self._compares_rewards = "reward" not in config.checkpoint.resume_allow_changes
        self._closing = ExitStack()
        self._pool: RewardPool | None = None
        if self._ranks.is_main:
            pool = RewardPool(self._functions, self._settings)
            self._pool = self._closing.enter_context(pool)
        folder = inputs.request.folder
        self._servers: PolicyServers | None = None
        context = resolve_context_length(config.data.context_length, inputs.request.model_config)
        context = min(context, positions(inputs.request.model_config))
        if self._settings.server:
            self._servers = PolicyServers(self._settings, self._tokenizer, self._ranks)
            context = min(context, self._servers.context or context)
        if self._settings.max_completion_length > context:
            raise UserError(
                f"--max_completion_length {self._settings.max_completion_length}: a prompt and its answer have "
                f"{context} positions (--context_length, or those of the model or a server). Use a smaller value."
            )
        tokens = PromptTokens(inputs.tokenizer, inputs.dataset.prompt_format, None, context)
        with self._ranks.local_main_process_first():
            dataset = read_dataset(config.data, tokens)
            self._held_out = held_out_prompts(inputs, tokens, dataset.by_place)
        self._prompts = dataset.by_place
        self._data = {"dataset": str(config.data.dataset), "sha256": dataset.sha256}
        base = self._ranks.broadcast_from_rank0(lambda: checksum_of(PolicyFiles(folder, folder)))
        self._base_checksum: str = base
        self._places = [*setup.resumed_folders[1:], *filter(None, [setup.unfinished])]
        self._continued = setup.unfinished if setup.resumed is None else setup.resumed.run
        self._directory = Path()
        self._batches = inputs.batches
        self._checksums = dict[int, str]()  # number of a round -> of the weights that sample it
        self.old = OldLogprobs(is_used=self._settings.num_iterations > 1)
        self._round: Round | None = None  # of the latest step
        self._generated_tokens = 0  # of the steps so far
        self._seconds = 0.0
        self._shown = list[Any]()  # in the report
        objective = inputs.objective
        assert isinstance(objective, Grpo)
        objective.rounds = self
        self._mismatch = MismatchMetrics()

    def opened(self, run: TrainingRun) -> None:
        """Find the rounds on disk, and verify those that will be trained on."""
        self._directory = run.directory
        self._places.insert(0, run.directory)
        if self._ranks.is_main and self._config.checkpoint.overwrite:
            self._keep_earlier_rounds()
        if self._servers is not None:
            self._servers.open(self._places, list(self._prompts.values()))
        if self._settings.max_generated_tokens:
            count = partial(self._count_tokens, run.state.step)
            self._generated_tokens = self._ranks.broadcast_from_rank0(count)
        if not self._ranks.is_main:
            return
        self._shown = kept_for_report(run)
        sampling = self._sampling(run.built)
        trained = self._number_of(run.state.step)
        waiting = []
        # the newest one that was trained on, too: rewards and data must be as they were
        changed = {"seed", "dataset"}.intersection(self._config.checkpoint.resume_allow_changes)
        checked = trained + 1 if changed else trained
        for folder in list_rounds(run.directory):
            if int(folder.name) >= checked:
                earlier = read_round(folder)
                facts = self._facts(sampling, earlier.facts.step, earlier.facts.policy["checksum"])
                facts = replace(facts, source=earlier.facts.source)
                self._check_as_made(folder, earlier, facts, None)
            if int(folder.name) > trained:
                waiting.append(folder)
        if waiting:
            log.info(
                f"{plural(len(waiting), 'round')} of the steps after {run.state.step} on disk: they are trained on, "
                "and not generated again"
            )

    def round_of(self, planned: StepBatches, built: BuiltModel) -> Round:
        """Return the round of a step. All ranks call it, with the weights before the step."""
        started = time.monotonic()
        number = self._number_of(planned.step)
        if self._round is not None and self._round.facts.step == number:
            self._seconds = 0.0
            return self._round
        sampling = self._sampling(built)
        prompts = self._prompts_of(planned)
        checksum = None  # of a round whose steps have begun the present weights are others
        if self._is_first_of_round(planned.step):
            checksum = trained_checksum(built, self._ranks, self._base_checksum)
            self.old.begin()
        else:
            self.old.read(self._places, number, self._ranks)
        facts = self._facts(sampling, number, self._sampled_by(number, checksum))
        stored: Round | None = self._ranks.broadcast_from_rank0(
            lambda: self._stored(facts, prompts)
        )
        if stored is None:
            self._make(facts, prompts, sampling, built)
            stored = self._ranks.broadcast_from_rank0(
                lambda: read_round(folder_of(self._directory, number))
            )
        if self._settings.staleness and checksum is not None:
            self._begin_next(number + 1, built, checksum)
        self._round = stored
        self._seconds = time.monotonic() - started
        if checksum is not None:  # else `opened` has counted it
            self._generated_tokens += stored.tokens
        return stored

    def _sampled_by(self, number: int, checksum: str | None) -> str | None:
        """Return the checksum of the weights that sample a round; None if it is not known any more.
        `checksum`: of the present weights, if its first step is next."""
        if self._servers is None or not self._settings.staleness or number == 1:
            return checksum
        if number not in self._checksums:
            published = self._servers.find(number)
            return None if published is None else published.checksum
        return self._checksums[number]

    def _begin_next(self, number: int, built: BuiltModel, checksum: str) -> None:
        """With --staleness 1: let servers sample the next round with the present weights, unless it
        is on disk, while the steps on this one are trained."""
        assert self._servers is not None
        self._checksums[number] = checksum
        first = (number - 1) * self._settings.num_iterations + 1
        if first > self._batches.total_steps:
            return
        [planned] = self._batches.steps(first, first, {})
        prompts = self._prompts_of(planned)
        if self._ranks.broadcast_from_rank0(partial(self._is_on_disk, number)):
            return
        sampling = self._sampling(built)
        facts = self._facts(sampling, number, checksum)
        scorer = Scorer(built, self.layout, sampling.temperature, self._ranks.device)
        with evaluating(built.model):
            self._servers.publish(scorer, sampling, facts)
        self._servers.begin(sampling, prompts, facts)

    def _is_on_disk(self, number: int) -> bool:
        folders = [folder_of(place, number) for place in self._places]
        return any(map(Path.is_dir, [*folders, unscored_folder_of(self._directory, number)]))

    def validate(self, name: str, built: BuiltModel) -> LossSums:
        """Return the sums of the rewards of answers to a validation set. All ranks call it."""
        prompts = self._held_out[name]
        count = self._settings.num_generations_eval
        sampling = replace(self._sampling(built), num_generations=count)
        with self._generating(built) as opened:
            answers = self._own_sampler(opened, sampling).sample(prompts, STEP)

        def score(look: Callable[[], None]) -> LossSums:
            assert self._pool is not None
            return reward_sums(self._pool, prompts, answers, look)

        return on_rank0(self._ranks, score)

    def after_step(self, run: TrainingRun, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Log the numbers of the round."""
        step = outcome.step
        if self._round is not None and self._is_first_of_round(step):
            self._shown = keep_for_report(run, step, self._round, self._shown)
        if self._settings.num_iterations > 1 and self._is_first_of_round(step):
            self.old.share(self._directory, self._number_of(step), self._ranks)
        if isinstance(outcome.batches, RoundStep):
            metrics.update(outcome.batches.metrics)
            metrics[SECONDS] = self._seconds
        limit = self._settings.max_generated_tokens
        is_last_of_round = self._is_first_of_round(step + 1)
        if limit and self._generated_tokens >= limit and is_last_of_round:
            outcome.end_early(f"max_generated_tokens {limit:,} is reached")

    def step_read(self, run: TrainingRun, outcome: StepOutcome) -> None:
        """Log the numbers of the importance weights."""
        self._mismatch.complete(outcome.metrics, outcome.step)

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """End the processes of the rewards, and delete the adapter of the servers."""
        self._closing.close()
        if self._servers is not None:
            self._servers.close(keeps_files=how == "stopped")

    def _keep_earlier_rounds(self) -> None:
        """Rename the rounds of the run that `--overwrite` replaces: they may have been paid."""
        is_continued = (
            self._continued is not None and self._continued.resolve() == self._directory.resolve()
        )
        folder = folder_of(self._directory, 1).parent
        if folder.is_dir() and not is_continued:
            set_aside(folder, "is of the run that --overwrite replaces")

    def _count_tokens(self, step: int) -> int:
        """Return the tokens of all answers up to a step."""
        tokens = 0
        for number in range(1, self._number_of(step) + 1):
            folders = [folder_of(place, number) for place in self._places]
            folder = next(filter(Path.is_dir, folders), None)
            tokens += 0 if folder is None else read_round(folder).tokens
        return tokens

    def _number_of(self, step: int) -> int:
        """Return the number of the round of a step."""
        return -(-step // self._settings.num_iterations)

    def _is_first_of_round(self, step: int) -> bool:
        return (step - 1) % self._settings.num_iterations == 0

    def _prompts_of(self, planned: StepBatches) -> list[Prompt]:
        """Return the prompts of a step, over all ranks, in the order of the dataset."""
        places = self._ranks.gather(
            [place for batch in planned.batches for place in batch.locations]
        )
        prompts = list[Prompt]()
        for own in places:
            # --skip_bad_rows may have skipped one that is too long
            prompts += [self._prompts[place] for place in own if place in self._prompts]
        return sorted(prompts, key=lambda prompt: prompt.index)

    def _sampling(self, built: BuiltModel) -> Sampling:
        settings = self._settings
        ends = stop_token_ids(self._tokenizer, built.model.generation_config.eos_token_id)
        return Sampling(
            temperature=settings.temperature,
            top_p=1.0,  # other distributions have tokens that the loss does not know
            top_k=0,
            max_completion_length=settings.max_completion_length,
            stop_ids=list(ends),
            num_generations=settings.num_generations,
            seed=self._config.train.seed,
        )

    def _facts(self, sampling: Sampling, number: int, checksum: str | None) -> RoundFacts:
        settings = self._settings
        config = self._config
        return RoundFacts(
            step=number,
            num_generations=settings.num_generations,
            policy={
                "model": config.model.model_name,
                "checksum": checksum,
                "compute": config.train.precision,
                "quantization": config.quantization.mode,
            },
            source={"kind": "own generation"} if self._servers is None else self._servers.source,
            sampling=sampling_facts(sampling, settings.prompts_per_step),
            seed=sampling.seed,
            rewards=[],
            data=self._data,
        )

    def _stored(self, facts: RoundFacts, prompts: list[Prompt]) -> Round | None:
        """Return a complete round that is on disk, in the run's directory afterwards."""
        for place in self._places:
            folder = folder_of(place, facts.step)
            if not folder.is_dir():
                continue
            earlier = read_round(folder)
            self._check(folder, earlier, facts, prompts)
            if place != self._directory:
                write_round(self._directory, earlier)
            log.debug(f"round {facts.step}: on disk, {describe(earlier)}")
            return earlier
        return None

    def _unscored(self, facts: RoundFacts, prompts: list[Prompt]) -> Round | None:
        folder = unscored_folder_of(self._directory, facts.step)
        if not folder.is_dir():
            return None
        earlier = read_round(folder)
        self._check(folder, earlier, facts, prompts, scored=False)
        return earlier

    def _begun(self, facts: RoundFacts, prompts: list[Prompt]) -> list[list[Answer]]:
        """Return the answers to the first prompts of a round that a signal has interrupted."""
        folder = begun_folder_of(self._directory, facts.step)
        if not folder.is_dir():
            return []
        earlier = read_round(folder)
        if earlier.facts.policy != facts.policy:  # a repeated step on a GPU
            return []
        self._check(folder, earlier, facts, prompts[: len(earlier.prompts)], scored=False)
        return earlier.answers

    def _check(
        self,
        folder: Path,
        earlier: Round,
        facts: RoundFacts,
        prompts: list[Prompt],
        scored: bool = True,
    ) -> None:
        """Raise a UserError if a round was made in another way. On a GPU, steps may differ in their
        last bits, so a round by other weights is used there: its log-probabilities are stored."""
        before = earlier.facts.policy["checksum"]
        checksum = facts.policy["checksum"]
        is_other = before != checksum and self._ranks.device.type != "cpu"
        if is_other and checksum is not None:
            log.warning(
                f"{folder}: was sampled with weights that differ from the present ones, at least by rounding. "
                "It is used, and its log-probabilities weigh its answers."
            )
        if is_other or checksum is None:
            facts = replace(facts, policy=facts.policy | {"checksum": before})
        # servers may be added or left out: the round has the log-probabilities of whatever sampled it
        facts = replace(facts, source=earlier.facts.source)
        self._check_as_made(folder, earlier, facts, prompts, scored)

    def _check_as_made(
        self,
        folder: Path,
        earlier: Round,
        facts: RoundFacts,
        prompts: list[Prompt] | None,
        scored: bool = True,
    ) -> None:
        """Raise a UserError if a round was made in another way. Other rewards can be allowed."""
        functions = self._functions if scored and self._compares_rewards else None
        check_round(folder, earlier, facts, functions, prompts, KEEP_REWARDS)

    def _make(
        self,
        facts: RoundFacts,
        prompts: list[Prompt],
        sampling: Sampling,
        built: BuiltModel,
    ) -> None:
        """Sample, score and write a round. What is on disk of it is not sampled again."""
        if self._servers is not None:
            with kept_if_stopped(facts, prompts, self._directory, self._ranks):
                self._servers.finish()
        unscored = self._ranks.broadcast_from_rank0(lambda: self._unscored(facts, prompts))
        begun: list[list[Answer]] = []
        if unscored is None:
            self._check_known(facts)
            begun = self._ranks.broadcast_from_rank0(lambda: self._begun(facts, prompts))
        with self._generating(built) as opened:
            sampler = self._sampler(opened, sampling, facts)
            maker = RoundMaker(sampler, self._pool, self._directory, self._ranks, is_training=True)
            rollouts = maker.make(facts, prompts, unscored, begun)
        if rollouts is not None:
            log.debug(f"round {facts.step}: {describe(rollouts)}")

    @contextmanager
    def _generating(self, built: BuiltModel) -> Iterator[LoadedModel]:
        """In the block the model can generate."""
        self._memory.enter("generation")
        model = built.model
        before = model.generation_config  # which is exported with the model
        opened = LoadedModel(built, self._tokenizer, "")
        with evaluating(model):
            try:
                yield opened
            finally:
                model.generation_config = before

    def _check_known(self, facts: RoundFacts) -> None:
        """Raise a UserError if a round is to be sampled whose weights are not here any more."""
        if facts.policy["checksum"] is None:
            raise UserError(
                f"round {facts.step}: is missing, and so are its weights, those before the previous round "
                f"(--staleness 1): {self._directory}/rollouts/policy-{facts.step:06}-*.\n"
                "Copy rollouts/ of the run, or resume from an earlier checkpoint."
            )

    def _sampler(self, opened: LoadedModel, sampling: Sampling, facts: RoundFacts) -> Sampler:
        if self._servers is None:
            return self._own_sampler(opened, sampling)
        scorer = Scorer(opened.built, self.layout, sampling.temperature, self._ranks.device)
        return PolicySampler(self._servers, scorer, sampling, facts)

    def _own_sampler(self, opened: LoadedModel, sampling: Sampling) -> OwnSampler:
        return OwnSampler(opened, sampling, self._settings.generate_batch_size, self._ranks)


def check(setup: Setup, inputs: RunInputs) -> None:
    """Raise a UserError for settings that do not fit together."""
    config = inputs.config
    settings = config.section(GrpoConfig)
    problems = list[str]()
    if not settings.reward:
        problems.append("--reward is needed: path/to/file.py:function, which scores each answer.")
    if config.data.streaming:
        problems.append("--streaming: prompts are needed at once. Leave it out.")
    if settings.kl_beta and (not config.peft.use_peft or changes_base(config)):
        problems.append(
            "--kl_beta: the reference is the model with its adapter off, so it needs a new adapter. Add --use_peft "
            "without --from_peft_checkpoint, --bias and --modules_to_save, or leave --kl_beta out."
        )
    if settings.server:
        problems += [*check_urls(settings.server), *find_problems(config)]
    if setup.resumed is not None:
        problems += changed_settings(settings, setup.resumed.trainer["config"].get("grpo", {}))
    if problems:
        raise UserError(*problems)


def changes_base(config: Config) -> bool:
    """Return whether the model with its adapter off is another one than before training."""
    peft = config.peft
    is_changed = peft.from_peft_checkpoint or peft.bias != "none" or peft.modules_to_save
    return bool(is_changed or config.model.resize_embeddings)


def changed_settings(settings: GrpoConfig, earlier: dict[str, Any]) -> list[str]:
    """Return what differs from the resumed run, as messages. Limits of processes may, and so may what
    has no effect, which older versions accepted and which is an error now."""
    lines = []
    for name, value in asdict(settings).items():
        before = earlier.get(name, value)
        has_effect = settings.num_iterations > 1 or not name.startswith("epsilon")
        if has_effect and name not in MAY_DIFFER and before != value:
            lines.append(f"--{name}: is {value}, and {before} in the resumed run. Set it to that.")
    return lines
