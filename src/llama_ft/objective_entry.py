"""What is known of an objective and of its first pass without torch: entries of config/objectives.py and
of extensions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

# What the value of a setting must be: the name of a model; the same, but not needed if a run is
# resumed; a file to read, or to write if it does not exist.
PathKind = Literal["model", "model_of_new_run", "file"]


@dataclass(frozen=True, eq=False)
class PassEntry:
    """What is known, without torch, of a pass of a model over all samples before training.

    Attributes:
        file: what it stores in the run's directory.
        paths: its settings that name a model or a file -> what they name.
        is_needed: tells whether there is a pass, from all settings by field name as attributes.
        why_no_stream: what is wrong with streamed samples.
        in_checkpoints: each checkpoint has a copy of the file.
        why_no_column: what is wrong with samples without the column that is read if no setting names
            a model or a file. Empty: no column is read.
    """

    file: str
    paths: dict[str, PathKind]
    is_needed: Callable[[Any], Any]
    why_no_stream: str
    in_checkpoints: bool = False
    why_no_column: str = ""


@dataclass(frozen=True)
class ObjectiveEntry:
    """What is known, without torch, of an objective.

    Attributes:
        implementation: its module and class.
        settings: settings that have an effect only with the objectives that list them.
        formats: dataset formats of its samples; `--dataset_format auto` becomes the first one.
            Empty: any format of one response per sample.
        metrics: what an evaluation measures in addition to the loss, for --best_by.
        first_pass: a pass of a model over all samples before training.
        has_images: samples may have images.
        has_score: the model gets a head for scores in place of the LM head.
        other_names: its names in other trainers, in lower case.
        loss_types: values of `--loss_type`; the first one is its default.
        samples_per_step: setting that says how many samples a step has, over all ranks. Empty: they
            follow from the micro-batches.
        steps_per_batch: setting that says how many steps one after another have the same samples.
        added_tokens: setting that says how many tokens training adds to a sample, at most.
        pads: its micro-batches are padded; `--batching_strategy packing` becomes padding.
        folder: directory in that of a run which it writes before the first checkpoint; a run that is
            started again uses it.
    """

    implementation: str
    settings: tuple[str, ...]
    formats: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("rewards/accuracies", "rewards/margins")
    first_pass: PassEntry | None = None
    has_images: bool = False
    has_score: bool = False
    other_names: str = ""
    loss_types: tuple[str, ...] = ()
    samples_per_step: str = ""
    steps_per_batch: str = ""
    added_tokens: str = ""
    pads: bool = False
    folder: str = ""
