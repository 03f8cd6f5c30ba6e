"""The objectives that --objective can name, and their settings.

An objective is a class in training/objectives/ and an entry of `OBJECTIVES` here, or comes with an
extension. What settings, help, messages, data and models need to know of it is in its entry, because
nothing here imports torch; the class is loaded when the objective is built.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft import door
from llama_ft.config.value_types import STRICT, Count
from llama_ft.objective_entry import ObjectiveEntry, PassEntry

PREFERENCE = "preference"
UNPAIRED = "unpaired_preference"
PROMPTS = "prompts"  # of samples of any format
# Settings of objectives whose model writes text: answers during training, and tasks.
OF_TEXT = ("sample_tokens", "eval_tasks")


def stores_reference(s: Any) -> bool:
    """Tell whether the reference's log-probabilities are computed once, before training: if the
    model with its adapter off is not the reference, or on request. `s`: all settings by field name
    as attributes."""
    # With one of these the model with its adapter off is another one than before training.
    changes_base = (
        s.from_peft_checkpoint or s.bias != "none" or s.modules_to_save or s.resize_embeddings
    )
    is_other = s.reference_model or changes_base or not s.use_peft
    return bool(is_other or s.precompute_ref_log_probs)


REFERENCE = PassEntry(
    file="reference.safetensors",
    paths={"reference_model": "model"},
    is_needed=stores_reference,
    why_no_stream="cannot be used: objective {objective} computes its reference once, for all samples, unless a new "
    "adapter is trained. Leave streaming out, or use use_peft without reference_model and "
    "precompute_ref_log_probs.",
    in_checkpoints=True,
)
TEACHER = PassEntry(
    file="teacher.safetensors",
    paths={"teacher_model": "model_of_new_run", "teacher_file": "file"},
    is_needed=lambda s: True,
    why_no_stream="cannot be used: objective {objective} runs its teacher once, over all samples. Leave streaming out.",
    why_no_column="is {}, but dataset {dataset} has no column logprobs. Set teacher_model.",
)
OF_REFERENCE = ("beta", "reference_model", "precompute_ref_log_probs")
PAIR_LOSSES = "llama_ft.training.objectives.preferences:Preferences"
OBJECTIVES: dict[str, ObjectiveEntry] = {
    "sft": ObjectiveEntry(
        "llama_ft.training.objectives.sft:SupervisedFineTuning",
        settings=(
            "train_vision",
            "freeze_LLM_only",
            "score",
            *OF_TEXT,
            "label_smoothing_factor",
            "loss_type",
        ),
        metrics=("perplexity",),
        loss_types=("nll", "dft"),
        has_images=True,
    ),
    "distill": ObjectiveEntry(
        "llama_ft.training.objectives.distill:Distillation",
        settings=(
            "score",
            *OF_TEXT,
            "teacher_model",
            "teacher_file",
            "distill_top_k",
            "distill_weight",
            "distill_temperature",
            "distill_divergence",
        ),
        metrics=("perplexity",),
        first_pass=TEACHER,
        other_names="gkd",
    ),
    "dpo": ObjectiveEntry(
        PAIR_LOSSES,
        settings=(*OF_TEXT, *OF_REFERENCE, "dpo_label_smoothing", "rpo_alpha"),
        formats=(PREFERENCE,),
        first_pass=REFERENCE,
        has_images=True,
    ),
    "ipo": ObjectiveEntry(
        PAIR_LOSSES,
        settings=(*OF_TEXT, *OF_REFERENCE, "rpo_alpha"),
        formats=(PREFERENCE,),
        first_pass=REFERENCE,
        has_images=True,
    ),
    "kto": ObjectiveEntry(
        "llama_ft.training.objectives.kto:Kto",
        settings=(*OF_TEXT, *OF_REFERENCE, "desirable_weight", "undesirable_weight"),
        formats=(UNPAIRED, PREFERENCE),
        metrics=("rewards/margins",),  # its samples are not compared with each other
        first_pass=REFERENCE,
    ),
    "simpo": ObjectiveEntry(
        PAIR_LOSSES,
        settings=(*OF_TEXT, "beta", "simpo_gamma", "dpo_label_smoothing", "rpo_alpha"),
        formats=(PREFERENCE,),
        has_images=True,
    ),
    "orpo": ObjectiveEntry(
        PAIR_LOSSES,
        settings=(*OF_TEXT, "beta"),
        formats=(PREFERENCE,),
        # no images: its loss is over the tokens of the prompt, too
    ),
    "reward": ObjectiveEntry(
        "llama_ft.training.objectives.reward:RewardModeling",
        settings=("center_rewards_coefficient",),
        formats=(PREFERENCE,),
        has_score=True,
        other_names="rm",
    ),
    **door.objectives(),
}
_PASSES = [entry.first_pass for entry in OBJECTIVES.values()]
PASSES = [entry for entry in dict.fromkeys(_PASSES) if entry is not None]
PASS_FILES = [entry.file for entry in PASSES]
FOLDERS = [entry.folder for entry in OBJECTIVES.values() if entry.folder]
LOSS_TYPES = [name for entry in OBJECTIVES.values() for name in entry.loss_types]
FILES_OF_CHECKPOINTS = [entry.file for entry in PASSES if entry.in_checkpoints]
DEFAULT_OBJECTIVE = next(iter(OBJECTIVES))
if TYPE_CHECKING:
    ObjectiveName = str
    LossType = str
else:
    ObjectiveName = Literal[tuple(OBJECTIVES)]
    LossType = Literal[tuple(LOSS_TYPES)]


@dataclass(config=STRICT, kw_only=True)
class PreferenceConfig:
    """Supervised fine-tuning, distillation, preferences or a reward model; TRL's names and
    defaults."""

    objective: ObjectiveName = DEFAULT_OBJECTIVE
    """sft: supervised fine-tuning. distill: learn from a teacher's probabilities, too. kto learns
    from completions with a label, the others from pairs of a chosen and a rejected response. dpo,
    ipo and kto compare with a reference, which is the model before training unless reference_model
    names another. simpo and orpo have none. reward: a reward model, with a head that scores
    responses in place of the LM head."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """dpo, ipo, kto: strength of the reference; with a lower beta the model moves further from it.
    simpo: factor on the margin. orpo: weight of the odds ratio."""

    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo, simpo: assumed share of pairs whose responses are swapped (TRL's label_smoothing)."""

    rpo_alpha: Annotated[float, Field(ge=0)] = 0.0
    """dpo, ipo, simpo: weight of the mean cross-entropy of the chosen response's tokens, which is
    added to the loss of a pair, such as 1 (RPO; for simpo TRL's cpo_alpha)."""

    reference_model: str | None = None
    """dpo, ipo, kto: directory or Hub name of another reference with the same tokenizer. It is
    evaluated once before training, then freed."""

    precompute_ref_log_probs: bool = False
    """dpo, ipo, kto with a new LoRA adapter: compute the reference's log-probabilities once, before
    training, instead of in each step. Worthwhile from the second epoch on. Without a new adapter they
    are always computed once."""

    teacher_model: str | None = None
    """distill: directory or Hub name of the teacher, with the same tokenizer. It runs once over the
    training samples, before the student is built. Without it, samples of tokens have its
    probabilities in a column logprobs."""

    teacher_file: str | None = None
    """distill: file for the teacher's probabilities, which other runs can use. By default it is in the
    run's directory. If it exists, the teacher is not run."""

    teacher_quantization: Literal["none", "8bit", "4bit"] = "none"
    """distill: quantization of the teacher."""

    distill_top_k: Count = 64
    """distill: number of the teacher's most likely tokens that are stored per token in the loss; 8
    bytes each."""

    distill_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """distill: weight of the KL divergence from the teacher; the cross-entropy has the rest."""

    distill_temperature: Annotated[float, Field(gt=0)] = 1.0
    """distill: temperature of teacher and student in the KL divergence."""

    distill_divergence: Literal["forward", "reverse"] = "forward"
    """distill: forward: KL(teacher || student), the student covers all that the teacher does. reverse:
    KL(student || teacher), the student avoids what the teacher does not do; for answers of the
    student."""

    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """simpo: target margin between the rewards of both responses (gamma)."""

    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: factor on the losses of desirable completions."""

    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: factor on the losses of undesirable completions."""

    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """reward: weight of the squared sum of both scores, which keeps scores around 0; such as
    0.01."""

    @property
    def entry(self) -> ObjectiveEntry:
        """What is known of the objective."""
        return OBJECTIVES[self.objective]


def first_pass_of(s: Any) -> PassEntry | None:
    """Return the pass over all samples that a run needs before training. `s`: all settings by field
    name as attributes."""
    entry = OBJECTIVES[s.objective].first_pass
    return entry if entry is not None and entry.is_needed(s) else None


def why_no_media(objective: str) -> str:
    """Return why samples cannot have images with an objective; empty if they can."""
    if OBJECTIVES[objective].has_images:
        return ""
    return f"--objective {objective} does not support images"


def has_setting(name: str, objective: str) -> bool:
    """Return whether a setting that only some objectives have has an effect with this one."""
    return name in OBJECTIVES[objective].settings


def own_settings() -> list[str]:
    """Return the settings that only some objectives have."""
    names = dict[str, None]()
    for entry in OBJECTIVES.values():
        names |= dict.fromkeys(entry.settings)
    return list(names)


def objectives_text(fits: Callable[[ObjectiveEntry], Any]) -> str:
    """Return the names of the objectives that fit, for a message: `dpo, ipo or simpo`."""
    names = [name for name, entry in OBJECTIVES.items() if fits(entry)]
    first = ", ".join(names[:-1])
    return f"{first} or {names[-1]}" if first else names[-1]
