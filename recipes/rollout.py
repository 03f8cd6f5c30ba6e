"""Sample answers to prompts, score them, and write them in rounds: token ids, log-probabilities, seeds
and rewards.

MODEL is a run's directory, a checkpoint, a saved adapter, or the directory or Hub name of a model. It
answers itself, also under torchrun, or servers answer for it (--server). Answers are on disk before they are
scored, and a round is complete before the next one begins. Started again, the command verifies the
complete rounds and generates the first missing one.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # Ctrl-C prints no traceback of an import; runtime.start replaces it
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped by Ctrl-C\n") and os._exit(130))

from llama_ft.config import FSDPConfig, parse_duration  # noqa: E402
from llama_ft.config.home import expanded  # noqa: E402
from llama_ft.errors import UserError, before_imports, plural  # noqa: E402
from llama_ft.extensions.rollouts.flags import RolloutFlags, read_rollout_flags  # noqa: E402

if __name__ == "__main__":
    with before_imports():
        FLAGS = read_rollout_flags(sys.argv[1:], str(__doc__))

from finetuning import build_model  # noqa: E402

from llama_ft import models, runtime  # noqa: E402
from llama_ft.config import DataConfig  # noqa: E402
from llama_ft.evaluation.pass_at_k import describe_pass_at_k  # noqa: E402
from llama_ft.extensions.rollouts.make_rounds import (  # noqa: E402
    RoundMaker,
    describe,
    sampling_facts,
)
from llama_ft.extensions.rollouts.policy import (  # noqa: E402
    checksum_of,
    find_policy,
    open_served,
    tokens_of,
)
from llama_ft.extensions.rollouts.prompts import PromptTokens, read_dataset  # noqa: E402
from llama_ft.extensions.rollouts.resume import find_rounds, locked  # noqa: E402
from llama_ft.extensions.rollouts.rewards.pool import RewardPool, parse_reward  # noqa: E402
from llama_ft.extensions.rollouts.rounds import (  # noqa: E402
    RoundFacts,
    list_rounds,
    read_round,
    rollouts_of,
)
from llama_ft.extensions.rollouts.sampling import OwnSampler, Sampler, Sampling  # noqa: E402
from llama_ft.extensions.rollouts.servers import ServerRequests, ServerSampler  # noqa: E402
from llama_ft.inference.load import open_model  # noqa: E402
from llama_ft.models.quantization.layers import quantization_name  # noqa: E402
from llama_ft.runtime import Ranks, log  # noqa: E402

SECONDS_TO_WAIT = 24 * 3600.0  # ranks wait while rank 0 computes rewards


class Policy(NamedTuple):
    """What answers: by name and checksum, the tokens of its prompts, and how it samples."""

    about: dict[str, Any]
    tokens: PromptTokens
    sampling: Sampling
    sampler: Sampler


def main(flags: RolloutFlags) -> None:
    """Generate, score and write the rounds that are missing."""
    degree = models.shard_degree(FSDPConfig(enable_fsdp=flags.enable_fsdp))
    with (
        runtime.start(flags.device, degree, timeout_seconds=SECONDS_TO_WAIT) as ranks,
        ExitStack() as closing,
    ):
        output_dir = expanded(str(flags.output_dir))
        functions = [parse_reward(text) for text in flags.reward]
        pool: RewardPool | None = None
        if ranks.is_main:
            closing.enter_context(locked(output_dir))
        if ranks.is_main and functions:
            pool = closing.enter_context(RewardPool(functions, flags))
        policy = open_servers(flags, ranks) if flags.server else open_own(flags, ranks)
        with ranks.local_main_process_first():
            dataset = read_dataset(data_of(flags), policy.tokens)
        starts = range(0, len(dataset.prompts), flags.prompts_per_step)
        rounds = [dataset.prompts[start : start + flags.prompts_per_step] for start in starts]
        facts = RoundFacts(
            step=0,
            num_generations=flags.num_generations,
            policy=policy.about,
            source=policy.sampler.source,
            sampling=sampling_facts(policy.sampling, flags.prompts_per_step),
            seed=flags.seed,
            rewards=[],
            data={"dataset": flags.dataset, "sha256": dataset.sha256},
        )
        on_disk = ranks.broadcast_from_rank0(
            lambda: find_rounds(output_dir, facts, functions, rounds, flags.score_again)
        )
        log.info(
            f"{plural(len(rounds), 'round')} of {flags.prompts_per_step} prompts with "
            f"{plural(flags.num_generations, 'answer')} each; {len(on_disk.finished)} complete"
        )
        maker = RoundMaker(policy.sampler, pool, output_dir, ranks)
        for step, prompts in enumerate(rounds, 1):
            if step in on_disk.finished:
                continue
            started = time.monotonic()
            unscored = on_disk.unscored.get(step)
            rollouts = maker.make(replace(facts, step=step), prompts, unscored)
            if rollouts is not None:
                seconds = time.monotonic() - started
                log.info(f"round {step} of {len(rounds)}: {describe(rollouts)}, {seconds:.1f} s")
        if ranks.is_main:
            if functions:
                log.info(f"\n{describe_pass_at_k(totals_of(output_dir), flags.pass_threshold)}")
            log.info(f"\nRounds: {rollouts_of(output_dir)}")


def open_own(flags: RolloutFlags, ranks: Ranks) -> Policy:
    """Load the model, which answers itself."""
    [place] = flags.paths
    opened = open_model(place, flags, ranks, build_model)
    log.info(opened.about)
    if opened.built.has_score:
        raise UserError(f"{place}: a reward model has no LM head, so it cannot answer.")
    model = opened.model
    ends = model.generation_config.eos_token_id  # a list, or None
    sampling = sampling_of(flags, list(ends or []))
    about = {
        "model": place,
        "checksum": ranks.broadcast_from_rank0(lambda: checksum_of(find_policy(place, flags))),
        "compute": str(model.dtype),
        "quantization": quantization_name(model),
    }
    tokens = tokens_of(opened, None if flags.prompt_format == "auto" else flags.prompt_format)
    sampler = OwnSampler(opened, sampling, flags.batch_size, ranks)
    return Policy(about, tokens, sampling, sampler)


def open_servers(flags: RolloutFlags, ranks: Ranks) -> Policy:
    """Connect to servers, which answer. Only the model's tokenizer is loaded."""
    if ranks.world_size > 1:
        raise UserError("--server: runs in one process. Leave out torchrun and --nproc.")
    [place] = flags.paths
    form = None if flags.prompt_format == "auto" else flags.prompt_format
    served = open_served(place, flags, form)
    sampling = sampling_of(flags, served.stop_ids)
    requests = ServerRequests(
        flags.server, flags.model, parse_duration(flags.server_timeout), flags.server_requests
    )
    sampler = ServerSampler(requests, sampling, served.tokenizer)
    log.info(f"{sampler.source['model']} at {', '.join(flags.server)}")
    context = min(served.tokens.context, sampler.context)
    about = {"model": place, "checksum": checksum_of(find_policy(place, flags, weights=False))}
    return Policy(about, served.tokens._replace(context=context), sampling, sampler)


def data_of(flags: RolloutFlags) -> DataConfig:
    """Return the settings of the dataset."""
    return DataConfig(
        dataset=str(flags.dataset),
        dataset_split=flags.dataset_split,
        columns=flags.columns,
        max_samples=flags.max_samples,
        skip_bad_rows=flags.skip_bad_rows,
    )


def sampling_of(flags: RolloutFlags, stop_ids: list[int]) -> Sampling:
    """Return how answers are sampled."""
    return Sampling(
        temperature=flags.temperature,
        top_p=flags.top_p,
        top_k=flags.top_k,
        max_completion_length=flags.max_completion_length,
        stop_ids=stop_ids,
        num_generations=flags.num_generations,
        seed=flags.seed,
    )


def totals_of(output_dir: Path) -> list[list[float | None]]:
    """Return the rewards of the answers to each prompt of all rounds."""
    totals = []
    for folder in list_rounds(output_dir):
        totals += [[answer.total for answer in group] for group in read_round(folder).answers]
    return totals


if __name__ == "__main__":
    main(FLAGS)
