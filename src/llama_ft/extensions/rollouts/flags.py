"""The command line of recipes/rollout.py."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.data_names import data_problem
from llama_ft.config.home import expanded
from llama_ft.config.paths import not_writable
from llama_ft.config.reading.tool_flags import check, read
from llama_ft.config.rules import SECRET
from llama_ft.config.value_types import STRICT, Count, CountOrZero, Duration
from llama_ft.extensions.rollouts.rewards.flags import MOST_GENERATIONS, RewardFlags
from llama_ft.inference.flags import ModelFlags, check_models
from llama_ft.masking import is_url_with_secret

OF_REWARDS = {
    "reward_timeout",
    "reward_memory",
    "reward_processes",
    "score_again",
    "pass_threshold",
}


@dataclass(config=STRICT, kw_only=True)
class RolloutServerFlags:
    """Servers that answer in place of the model itself."""

    server: list[str] = Field(default_factory=list)
    """URLs of vLLM or another OpenAI-compatible server: http://localhost:8000,http://gpu2:8000. They
    share the prompts. OPENAI_API_KEY has their key, if they want one. MODEL then says whose tokenizer
    and chat template are used."""

    model: str | None = None
    """With --server: the name by which the servers have the model or adapter."""

    server_timeout: Duration = "10m"
    """With --server: longest time of a request."""

    server_requests: Count = 32
    """With --server: requests at the same time, per server."""


@dataclass(config=STRICT, kw_only=True)
class RolloutFlags(RewardFlags, RolloutServerFlags, ModelFlags):
    """Flags of recipes/rollout.py."""

    dataset: str | None = None
    """Prompts: data as of the training recipe. Messages that end with the user's, a column prompt, or
    samples for fine-tuning, whose response is passed to the rewards only."""

    dataset_split: str = "train"
    """Split of data that have splits."""

    columns: list[str] = Field(default_factory=list)
    """Columns that have other names than in the format, as prompt=Question."""

    max_samples: CountOrZero = 0
    """Use the first N samples only; 0 = all."""

    skip_bad_rows: bool = False
    """Skip samples that cannot be used, instead of stopping."""

    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """How a prompt of text is asked: chat with the chat template, text without it; auto: as in the
    fine-tuning."""

    output_dir: str | None = None
    """Directory for the rounds, which are written to its rollouts/, or into itself if that is its
    name. Complete rounds are kept, and the first missing one is generated next."""

    num_generations: Annotated[int, Field(ge=1, le=MOST_GENERATIONS)] = 8
    """Answers per prompt."""

    prompts_per_step: Count = 8
    """Prompts per round, all ranks together."""

    max_completion_length: Count = 256
    """Maximum tokens of an answer."""

    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Sampling temperature."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that make up this probability. Rounds for reinforcement
    learning need 1."""

    top_k: CountOrZero = 0
    """Sample from this many of the likeliest tokens; 0: from all. Rounds for reinforcement learning
    need 0."""

    seed: CountOrZero = 42
    """Seed of all rounds. The seed of an answer is made of it, the round, the prompt and the answer's
    number."""

    batch_size: Count = 32
    """Without --server: answers generated at once, per rank."""

    score_again: bool = False
    """Score the answers of complete rounds again if --reward has changed. Their rewards are replaced."""

    pass_threshold: float = 1.0
    """An answer with at least this reward is right, for pass@k."""


def read_rollout_flags(argv: list[str], description: str) -> RolloutFlags:
    """Return the flags, with the one model in `paths`; raise UserError with all errors."""
    flags, parsed, errors = read(argv, RolloutFlags, description)
    errors += check_models(flags)
    if len(flags.paths) > 1:
        errors.append(f"{' and '.join(flags.paths)}: cannot be combined. Give one of them.")
    if flags.dataset is None:
        errors.append("--dataset is needed: the prompts.")
    elif problem := data_problem(flags.dataset):
        errors.append(f"--dataset {flags.dataset}: {problem}")
    if flags.output_dir is None:
        errors.append("--output_dir is needed: the directory for the rounds.")
    elif problem := not_writable(expanded(flags.output_dir)):
        errors.append(f"--output_dir {flags.output_dir}: {problem}")
    given = set(parsed.origins)
    if not flags.reward:
        errors += [f"--{name}: needs --reward." for name in sorted(given & OF_REWARDS)]
    errors += _check_servers(flags, given)
    check(errors)
    return flags


def _check_servers(flags: RolloutFlags, given: set[str]) -> list[str]:
    """Return the error messages about --server."""
    own_flags = {"quantization", "precision", "device", "enable_fsdp", "batch_size"}
    if not flags.server:
        alone = sorted(given & {"model", "server_timeout", "server_requests"})
        return [f"--{name}: needs --server." for name in alone]
    errors = check_urls(flags.server)
    errors += [
        f"--{name}: not with --server, which computes." for name in sorted(given & own_flags)
    ]
    return errors


def check_urls(urls: list[str]) -> list[str]:
    """Return the error messages about --server."""
    errors = []
    for url in urls:
        if is_url_with_secret(url):
            errors.append(f"--server {SECRET}")
        elif not url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
            errors.append(f"--server {url}: expected a URL such as http://localhost:8000.")
    if len(set(urls)) < len(urls):
        errors.append("--server: names a URL twice.")
    return errors
