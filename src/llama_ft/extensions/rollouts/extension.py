"""`llama-ft rollout` samples answers to prompts, scores them and writes them in rounds, which are
a dataset of the training recipe. `--objective grpo` trains on a round in each step."""

import os
from pathlib import Path
from typing import Any

from llama_ft.door import Extension, Verb
from llama_ft.objective_entry import GeneratedSteps, ObjectiveEntry


def holds_rounds(directory: Path) -> bool:
    """Return whether a directory is a round, or has rounds, perhaps in its subdirectory rollouts; also
    those whose answers are not scored yet. Their files are not read as other data, which have texts."""
    folder = directory if directory.name == "rollouts" else directory / "rollouts"
    is_round = os.path.isfile(directory / "round.json")  # False without permission to look
    return is_round or any(folder.glob("*/round.json"))


def steps_of_answers(config: Any) -> GeneratedSteps:
    """Return how the answers of a step are generated."""
    settings = config.grpo
    return GeneratedSteps(
        setting="prompts_per_step",
        samples=settings.prompts_per_step,
        examples=settings.prompts_per_step * settings.num_generations,
        repeats=settings.num_iterations,
        added_tokens=settings.max_completion_length,
        plan="llama_ft.extensions.rollouts.grpo.planned_answers:generate_for_plan",
    )


GRPO = ObjectiveEntry(
    "llama_ft.extensions.rollouts.grpo.objective:Grpo",
    settings=(
        "sample_tokens",
        "eval_tasks",
        "kl_beta",
        "loss_type",
        "reward",
        "reward_timeout",
        "reward_memory",
        "reward_processes",
        "num_generations",
        "num_generations_eval",
        "prompts_per_step",
        "num_iterations",
        "max_completion_length",
        "temperature",
        "max_generated_tokens",
        "generate_batch_size",
        "server",
        "server_timeout",
        "server_requests",
        "staleness",
        "epsilon",
        "epsilon_high",
        "importance_sampling_level",
        "scale_rewards",
        "equal_groups",
        "mask_truncated_completions",
        "importance_weights",
        "importance_clip_max",
    ),
    formats=("prompts",),
    metrics=("reward",),
    loss_types=("dapo", "grpo", "dr_grpo"),
    make_steps=steps_of_answers,
    folder="rollouts",
)
EXTENSION = Extension(
    settings={"grpo": "llama_ft.extensions.rollouts.grpo.settings:GrpoConfig"},
    part="llama_ft.extensions.rollouts.grpo.training_rounds:TrainingRounds",
    needs_part=lambda config: config.preference.objective == "grpo",
    objectives={"grpo": GRPO},
    holds_dataset=holds_rounds,
    dataset="llama_ft.extensions.rollouts.dataset:open_rounds",
    verbs={
        "rollout": Verb(
            "rollout",
            "Sample answers to prompts, with rewards. --nproc N: on N processes.",
            takes_nproc=True,
        )
    },
)
