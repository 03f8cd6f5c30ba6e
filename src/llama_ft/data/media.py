"""The seam to an extension that reads what samples hold in addition to text, such as images.

Every other part of this package has `media: Media | None`; None: no sample holds any, and nothing
of the extension is imported. read/media.py finds media in samples.

    sample --with_parts--> messages with MediaPart --tokenize--> MediaExample, a row of the table
    rows   --tensors-----> tokens, MediaTensors of a Batch --arguments--> arguments of the model
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from llama_ft import door
from llama_ft.data.read.formats import Message, Sample, SampleFormat

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from llama_ft.config import Config, DataConfig, ModelConfig
    from llama_ft.data.batches.sampler import Batch
    from llama_ft.data.chat.loss_mask import RenderedChat
    from llama_ft.data.tokenize.encoder import Encoder
    from llama_ft.data.tokenize.statistics import SplitStatistics


class MediaExample(tuple[list[int], list[int]]):
    """Tokens and labels of a sample with media, and what tensors are made from.

    Attributes:
        text: the rendered chat with one mark per file, as the model's processor takes it.
        media: a checksum and the path of each file, with a space between.
        media_tokens: number of tokens that stand for them.
    """

    text: str
    media: list[str]
    media_tokens: int

    @classmethod
    def of(
        cls, example: tuple[list[int], list[int]], text: str, media: list[str], media_tokens: int
    ) -> "MediaExample":
        extended = cls(example)
        extended.text = text
        extended.media = media
        extended.media_tokens = media_tokens
        return extended


class MediaPrompt(list[int]):
    """Token ids of a prompt with media, and what tensors are made from.

    Attributes:
        text, media: as of `MediaExample`. The text may go on after the prompt, if no file follows.
    """

    def __init__(self, input_ids: Sequence[int], text: str, media: list[str]) -> None:
        super().__init__(input_ids)
        self.text = text
        self.media = media

    @property
    def paths(self) -> list[str]:
        """The files."""
        return [reference.partition(" ")[2] for reference in self.media]


class MediaTensors(Protocol):
    """What the model's processor makes of a micro-batch, in addition to tokens."""

    @property
    def checksums(self) -> list[bytes]:
        """The checksums of the files of each example; empty of one without files."""

    def prepare(
        self, model: nn.Module, batch: "Batch", lengths: list[int], device: torch.device
    ) -> None:
        """Make ahead of time what `arguments` needs, in the thread that makes batches."""

    def arguments(
        self, model: nn.Module, batch: "Batch", lengths: list[int], device: torch.device
    ) -> dict[str, Any]:
        """Return the further arguments of a model, on the device.

        Args:
            model: with its towers.
            batch: the micro-batch of these tensors.
            lengths: tokens of each example. A packed sequence may have one example more than the
                batch, which is text.
            device: where the model computes.
        """

    def without_values(self, copies: int) -> list[torch.Tensor]:
        """Replace large tensors by ones without storage, for a plan. Return that many copies of
        them, which wait in host memory."""


@dataclass(frozen=True)
class MediaModel:
    """The model that media are read for.

    Attributes:
        folder: its directory, with the processor.
        config: of the model.
        tokenizer: of the run.
        trust_remote_code: code of the directory's own processor may run.
    """

    folder: Path
    config: "PretrainedConfig"
    tokenizer: "PreTrainedTokenizerBase"
    trust_remote_code: bool


def media_reader() -> "MediaReader":
    """Load the extension that reads media."""
    reader: MediaReader = door.media_reader()
    return reader


class MediaReader(Protocol):
    """What the extension does without a model's processor."""

    def load(self, model: MediaModel, config: "DataConfig", cache: Path) -> "Media":
        """Load what reads media for a model. Sets the tokenizer's chat template to the processor's, if
        it has none.

        Args:
            model: the model.
            config: max_pixels and streaming.
            cache: the directory of cached data.

        Raises:
            UserError: the directory has no processor, or it cannot be used.
        """

    def with_parts(self, sample: Sample, sample_format: SampleFormat, cache: Path) -> Sample:
        """See `Media.with_parts`. `cache`: the directory of cached data."""

    def prepare_towers(self, model: nn.Module) -> None:
        """Change a model on the meta device with its towers, so that each sample of a batch is
        computed as if it was alone, and so that the host does not wait for the device."""

    def choose_trained(self, built: Any, model: "ModelConfig") -> list[str]:
        """Freeze what the settings do not train of a `BuiltModel` with its towers. Return the names of
        towers, or of modules within them, that are trained."""

    def thumbnail(self, path: str) -> str:
        """Return a small picture of a file as a data: URL; "" if the file is gone or broken."""

    def planned(self, per_example: int = 1, tokens: int | None = None) -> Any:
        """Return the `PlannedMedia` of a plan.

        Args:
            per_example: files in each packed sequence, or in each padded sample.
            tokens: of one; None: as the settings say.
        """


class Media(Protocol):
    """Reads the media of samples and runs the model's processor on them."""

    @property
    def identity(self) -> str:
        """A text that changes with everything that determines the tokens of media."""

    @property
    def code(self) -> list[Path]:
        """The files of code that determine them, too."""

    def in_cache(self, cache: Path, is_full: bool) -> "Media":
        """Return the same reader with another directory of cached data. `is_full`: it takes no
        further file."""

    def check(self) -> None:
        """Raise UserError if the processor or the chat template does not support media."""

    def check_settings(self, config: "Config") -> None:
        """Raise UserError for settings that are not supported with media."""

    # samples

    def with_parts(self, sample: Sample, sample_format: SampleFormat) -> Sample:
        """Return a sample whose media are `MediaPart`s of its messages, with absolute paths. A sample
        without media stays as it is. Raises BadSample."""

    def with_absolute_paths(
        self, sample: Sample, folder: str, columns: Sequence[str]
    ) -> dict[str, Any]:
        """Return a sample whose media have absolute paths, for a data file in another directory than
        `folder`. `columns`: names of the columns of media."""

    def tokenize(
        self, chat: "RenderedChat", messages: list[Message], encoder: "Encoder"
    ) -> MediaExample:
        """Tokenize a chat with media, whose tokens are never in the loss. Raises BadSample."""

    def check_text(self, input_ids: list[int]) -> None:
        """Raise BadSample if a text without media has a token that stands for some."""

    def remove_incomplete(self, folder: Path) -> bool:
        """Delete tokenized samples if one needs a file of the cache that is corrupted or missing, and
        return whether it is so. Tokenizing again writes the file again."""

    # batches and prompts

    def tensors(
        self,
        samples: list[torch.Tensor],
        texts: list[str | None],
        media: list[list[str] | None],
        locations: Sequence[str],
        is_packed: bool,
    ) -> tuple[list[torch.Tensor], MediaTensors]:
        """Return the tokens of all examples of a micro-batch and its tensors. The examples are the
        samples, and the filler if none has media: all ranks must run the towers.

        Args:
            samples: tokens of each sample, int64 [tokens].
            texts, media: of samples with media, else None; see `MediaExample`.
            locations: place of each sample, for messages.
            is_packed: the examples become one sequence; else a padded batch.

        Raises:
            RunFailure: a file has changed since it was tokenized.
        """

    def prompt(self, text: str, messages: list[Message]) -> MediaPrompt:
        """Return the tokens of a chat with media. `text`: what the chat template writes, up to the
        place of the answer. Raises BadSample."""

    def prompt_arguments(
        self, model: nn.Module, prompts: list[list[int]]
    ) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        """Return prompts that are answered in one batch, and the further arguments of `generate`.
        With several ranks there may be one more prompt at the end: ranks whose prompts have no media
        run the towers, too. Its answer is not needed."""

    def towers_in_root(self, model: Any) -> AbstractContextManager[None]:
        """In the block, `generate` may run towers of a sharded model: inside of the hooks of the root
        unit, which has weights of them."""

    # checks and plans

    def samples_to_compare(self, built: Any, samples: "Dataset", device: torch.device) -> Any:
        """Return samples with media for `check_packing`."""

    def planned(self, train: "SplitStatistics", is_packed: bool) -> Any:
        """Return the `PlannedMedia` of samples with these counts."""


def checksums_of(media: Sequence[str]) -> bytes:
    """Return the checksums of files, without their paths: a run may resume with its data in another
    directory. `media`: as of `MediaExample`."""
    return "".join(reference.partition(" ")[0] for reference in media).encode()
