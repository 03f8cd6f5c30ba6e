"""A pass of a model over all samples before training, for objectives that need its numbers: DPO's
reference, a teacher.

    find the other model -> build it, frozen -> compute -> free it -> build the run's own model

What it computes is stored in a file of the run, so that a resumed run does not compute it again.
"""

import dataclasses
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llama_ft import models
from llama_ft.config import Config, PeftConfig, QuantizationConfig
from llama_ft.data import Batch, BatchLayout, TokenizedData
from llama_ft.errors import UserError, plural
from llama_ft.models import BuiltModel
from llama_ft.models.base.source import listed
from llama_ft.phases import PhaseMonitor
from llama_ft.runtime import Ranks, log


@dataclasses.dataclass(frozen=True)
class PassInputs:
    """What a pass needs of a run.

    Attributes:
        request: the settings and the model that is fine-tuned.
        tokenizer: of the run.
        dataset: the samples.
        layout: of this rank's micro-batches in training.
        ranks: the ranks; all of them call every method of a pass together.
        resumed: directories of the checkpoint and of the run that are resumed; none for a new run.
        unfinished: directory of an attempt of this run that ended before its first checkpoint; it
            may have stored the numbers.
    """

    request: models.ModelRequest
    tokenizer: PreTrainedTokenizerBase
    dataset: TokenizedData
    layout: BatchLayout
    ranks: Ranks
    resumed: tuple[Path, ...] = ()
    unfinished: Path | None = None

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the model that is fine-tuned; None if unknown."""
        new_tokens = self.request.new_tokens
        if new_tokens is not None:
            return new_tokens.rows
        return models.vocabulary_size(self.request.model_config)


class OtherModel(NamedTuple):
    """A model that was found on disk or the Hub."""

    name: str
    folder: Path
    config: PretrainedConfig


class FirstPass(ABC):
    """A pass of a model over all samples. An objective makes one from its settings alone, so that it
    can be planned; `prepare` gets everything else.

    Args:
        config: the settings of the run.
        name: the other model; None if there is none.
        quantization: of the other model.

    Attributes:
        title: what it is called in the log.
        flag: the flag that names the other model.
        name: see Args.
        config: the settings with which the other model is built: the run's, without an adapter.
    """

    title: str
    flag: str

    def __init__(self, config: Config, name: str | None, quantization: QuantizationConfig) -> None:
        self.name = name
        self._inputs: PassInputs | None = None
        model = dataclasses.replace(
            config.model, model_name=name or config.model.model_name, freeze_layers=False
        )
        self.config = dataclasses.replace(
            config, model=model, peft=PeftConfig(), quantization=quantization
        )

    @property
    def inputs(self) -> PassInputs:
        """What `prepare` was called with."""
        assert self._inputs is not None
        return self._inputs

    def needs_other_model(self) -> bool:
        """Return whether another model runs, unless a file of an earlier run has its numbers."""
        return self.name is not None

    @abstractmethod
    def prepare(
        self, inputs: PassInputs, build_model: models.BuildModel, memory: PhaseMonitor
    ) -> None:
        """Find the stored numbers; or compute them with the other model, and free it.

        Args:
            inputs: of the run.
            build_model: the recipe's function.
            memory: informed about phases.

        Raises:
            UserError: the other model or a file does not fit the run.
        """

    @abstractmethod
    def complete(self, built: BuiltModel, directory: Path) -> None:
        """Put the file into the run's directory, so that the run can be resumed.

        Args:
            built: the model before step 1, also if the run is resumed. It computes the numbers that
                no other model has computed.
            directory: of the run.
        """

    @abstractmethod
    def compute(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> object:
        """Compute the numbers of a micro-batch with the other model."""

    @abstractmethod
    def fill_for_plan(self) -> None:
        """Give the objective any numbers that take as much memory."""

    def bytes_per_token(self) -> int:
        """Return the size of the file per token in the loss, if it is worth a line of the plan."""
        return 0

    def bytes_of(self, examples: int, tokens: int) -> int:
        """Return the size of the file for so many examples and tokens in the loss; see
        `bytes_per_token`."""
        return 0

    def find_other_model(self, name: str) -> OtherModel:
        """Find the other model, and check that it has the tokens of the run."""
        trust = self.config.model.trust_remote_code
        ranks = self.inputs.ranks
        with ranks.local_main_process_first():
            folder = models.local_folder(name, self.flag, ranks.local_rank == 0)
            models.check_no_adapter(folder, self.flag)
            model_config = models.load_model_config(folder, trust)
            theirs = models.load_tokenizer(folder, trust)
            check_same_tokens(self.flag, name, theirs, self.inputs.tokenizer)
        return OtherModel(name, folder, model_config)

    def run_other_model(
        self,
        other: OtherModel,
        compute: Callable[[BuiltModel], None],
        build_model: models.BuildModel,
        memory: PhaseMonitor,
    ) -> None:
        """Build the other model, frozen, call `compute` with it, and free it."""
        ranks = self.inputs.ranks
        log.info(f"{self.title}: {other.name}")
        if ranks.is_main and (stored := models.describe_published(other.folder, other.config)):
            log.info(stored)
        models.choose_head(other.config, self.config.preference.entry.has_score)
        request = models.ModelRequest(self.config, other.folder, other.config, purpose="reference")
        built = build_model(request, ranks, memory)
        memory.enter("evaluation")
        compute(built)
        del built
        gc.collect()  # FSDP units and modules refer to each other
        torch.cuda.empty_cache()


def check_same_tokens(
    flag: str, name: str, theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase
) -> None:
    """Raise a UserError unless both tokenizers have the same tokens with the same ids. `name` is
    the model of `flag`: it scores the run's ids."""
    their_ids = theirs.get_vocab()
    our_ids = ours.get_vocab()
    tokens = their_ids.keys() | our_ids.keys()
    others = sorted(token for token in tokens if their_ids.get(token) != our_ids.get(token))
    if others:
        raise UserError(
            f"{flag} {name}: its tokenizer differs from the run's in {plural(len(others), 'token')} "
            f"({listed(others, 3)}).\nUse a model with the same tokenizer, such as another one of the same family."
        )
