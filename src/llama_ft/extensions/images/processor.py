"""The model's own processor: it says how many tokens an image takes, and makes pixels.

Tokenization (in worker processes, once):

    text, images  --processor-->  text in which each image has its tokens  -->  input_ids, labels

Batches (in the prefetch thread, for each micro-batch):

    text, images  --processor-->  pixel_values, image_grid_thw, ... by the processor's own names

Both call the same processor with the same text and files, so a batch fits its cached tokens; if not,
a file has changed and the run stops. Nothing here knows a model family.

A micro-batch without an image gets one more example, the filler: a grey image without labels.
Otherwise a rank whose samples have no image would not all-gather the towers' weights, for which
other ranks wait.
"""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config
from llama_ft.data.chat.chat_template import Span, render_chat, template_for
from llama_ft.data.chat.loss_mask import RenderedChat
from llama_ft.data.media import MediaExample, MediaPrompt, checksums_of
from llama_ft.data.read.formats import BadSample, Message, Sample, SampleFormat
from llama_ft.data.read.media import MediaPart, media_paths
from llama_ft.data.tokenize.encoder import Encoder, tokens_of_spans
from llama_ft.data.tokenize.statistics import SplitStatistics
from llama_ft.errors import RunFailure, UserError, plural, reason
from llama_ft.extensions.images import cross_attention
from llama_ft.extensions.images.compare import ImageSamples
from llama_ft.extensions.images.image_inputs import ImageTensors, taken_arguments
from llama_ft.extensions.images.image_prompts import image_prompt, prompt_tensors
from llama_ft.extensions.images.planned_images import PlannedImages
from llama_ft.extensions.images.samples.expansion import Expansion, placeholder_of, without_spans
from llama_ft.extensions.images.samples.image_files import read_image
from llama_ft.extensions.images.samples.image_parts import (
    ImageStore,
    with_absolute_paths,
    with_image_parts,
)
from llama_ft.extensions.images.towers.generate import towers_in_root
from llama_ft.models import BuiltModel
from llama_ft.runtime.console import log

if TYPE_CHECKING:  # PIL is imported for images only: not every environment has it
    from PIL import Image

FILLER_SIDE = 64  # pixels
# files that determine the tokens
CODE = ("samples/expansion.py", "samples/image_parts.py", "load_processor.py", "processor.py")
DECODERS = 4  # threads that decode images of a micro-batch
# of processors, if text and images do not fit, or an image has an odd size
PROCESSOR_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    StopIteration,
    RuntimeError,
    MemoryError,
)
# makes a processor return where it inserted what
REPLACEMENTS = {"return_text_replacement_offsets": True}
# what a processor returns about tokens, apart from its tensors
TEXT_OUTPUTS = {"input_ids", "attention_mask", "text_replacement_offsets"}


class ExpandedChat(NamedTuple):
    """A chat in which images have their tokens."""

    chat: RenderedChat
    inserted: list[Span]  # characters that stand for images
    input_ids: list[int]  # as the processor tokenizes it
    references: list[str]  # see `MediaExample.media`


class _Filler(NamedTuple):
    input_ids: torch.Tensor  # int64 [tokens]
    text: str


class Images:
    """Reads images, and runs the processor on them.

    Args:
        processor: from `load_processor`.
        store: keeps images whose bytes are in the data.
        max_pixels: larger images are reduced to this number of pixels before the processor gets
            them; None: only the processor's own limits.
    """

    def __init__(self, processor: Any, store: ImageStore, max_pixels: int | None) -> None:
        self.store = store
        self._processor = processor
        self._max_pixels = max_pixels

    def in_cache(self, cache: Path, is_full: bool) -> "Images":
        """Return the same reader with the files of another cache."""
        return Images(self._processor, ImageStore(cache, is_full), self._max_pixels)

    @property
    def chat_template(self) -> Any:
        """The processor's chat template; None without one."""
        return self._processor.chat_template

    @property
    def identity(self) -> str:
        """A text that changes with everything that determines an image's tokens."""
        settings = {**self._processor.to_dict(), "processor_class": self._class_name}
        return f"{json.dumps(settings, sort_keys=True, default=str)} {self._max_pixels}"

    @property
    def code(self) -> list[Path]:
        """The files of code that determine them, too."""
        return [Path(__file__).parent / name for name in CODE]

    @property
    def by_cross_attention(self) -> bool:
        """Whether the model sees images by cross attention, not by tokens. Then pixels have a row per
        sample, so samples cannot be packed."""
        return cross_attention.MASK in self._processor.model_input_names

    @property
    def _advice(self) -> str:
        return f"Restore it, or delete {self.store.cache / 'tokenized'} to tokenize again."

    @property
    def _class_name(self) -> str:
        return type(self._processor).__mro__[1].__name__

    def check_settings(self, config: Config) -> None:
        """Raise a UserError for settings that are not supported with images."""
        if config.model.compile or config.model.use_liger is True:
            raise UserError(
                "--compile and --use_liger: not supported if samples have images. Set both to false."
            )
        if self.by_cross_attention and config.data.batching_strategy == "packing":
            raise UserError(
                "--batching_strategy packing: this model sees images by cross attention, and its samples "
                "cannot be packed.\nUse --batching_strategy padding."
            )
        if config.fsdp.enable_fsdp and config.fsdp.fsdp_wrap_policy == "size":
            raise UserError(
                "--fsdp_wrap_policy size: not supported if samples have images. Use hybrid."
            )

    def with_parts(self, sample: Sample, sample_format: SampleFormat) -> Sample:
        """Return a sample whose images are parts of its messages, see `with_image_parts`."""
        return with_image_parts(sample, sample_format, self.store)

    def with_absolute_paths(
        self, sample: Sample, folder: str, columns: Sequence[str]
    ) -> dict[str, Any]:
        """Return a sample whose images have absolute paths, see the function."""
        return with_absolute_paths(sample, folder, columns)

    def check(self) -> None:
        """Run the processor on one image.

        Raises:
            UserError: images are not supported with this processor or chat template.
        """
        try:
            replaced, _ = self._expanded(self._filler_text, [_grey_image()])
        except BadSample as error:
            raise UserError(f"samples have images, but {error}.") from error
        except PROCESSOR_ERRORS as error:
            raise UserError(
                f"samples have images, and the model's processor rejects one written by the chat "
                f"template ({reason(error)}).\nUse another --chat_template."
            ) from error
        if replaced is None:
            raise UserError(
                f"samples have images, which are not supported with {self._class_name}: it does not "
                "say what it inserts."
            )
        if len(replaced) != 1:
            raise UserError(
                "samples have images, and the chat template does not write them.\nUse another "
                "--chat_template."
            )

    def expand(self, chat: RenderedChat, messages: list[Message]) -> ExpandedChat:
        """Let the processor put the tokens of the images into a rendered chat.

        Raises:
            BadSample: an image cannot be read or gets no token, or the chat has not one mark per image.
        """
        images = []
        references = []
        paths = media_paths(messages)
        for path in paths:
            image, checksum = self._open(path)
            images.append(image)
            references.append(f"{checksum} {path}")
        try:
            replaced, input_ids = self._expanded(chat.text, images)
        except PROCESSOR_ERRORS as error:
            raise BadSample(f"the model's processor rejects it: {reason(error)}.") from None
        assert replaced is not None  # see `check`
        if len(replaced) != len(images):
            raise BadSample(
                f"the chat template writes {len(replaced)} places for {len(images)} images; use "
                "another one (--chat_template)."
            )
        for image, path, each in zip(images, paths, replaced, strict=True):
            if not each["replacement"] or self._placeholder not in each["replacement"]:
                raise BadSample(
                    f"{path} gets no token in this model ({image.width} x {image.height} pixels); "
                    "use a larger image, or a larger --max_pixels if it is set."
                )
        text = Expansion(replaced)
        inserted = [text.moved(each["span"][0], each["span"][1]) for each in replaced]
        spans = [text.moved(*span) for span in chat.spans]
        expanded = RenderedChat(
            text.of(chat.text),
            without_spans(spans, inserted),
            [text.position(prompt) for prompt in chat.prompts],
        )
        return ExpandedChat(expanded, inserted, input_ids, references)

    def tokenize(
        self, chat: RenderedChat, messages: list[Message], encoder: Encoder
    ) -> MediaExample:
        """Tokenize a chat with images, whose tokens are never in the loss."""
        expanded = self.expand(chat, messages)
        input_ids, labels = encoder.tokenize_chat(expanded.chat)
        if input_ids != expanded.input_ids:
            raise BadSample(
                "its prompt and response share a token, and the model's processor tokenizes them "
                "together; use another chat template (--chat_template)."
            )
        text = expanded.chat.text
        backend = encoder.tokenizer.backend_tokenizer
        offsets = backend.encode(text, add_special_tokens=False).offsets
        ranges = tokens_of_spans(text, offsets, expanded.inserted)
        image_tokens = sum(last - first for first, last in ranges)
        end = ranges[-1][1]
        whole = len(input_ids)
        keeps_images = whole <= encoder.context_length or encoder.truncation == "drop"
        keeps_images |= encoder.truncation == "right" and end <= encoder.context_length
        if not keeps_images:
            raise BadSample(
                f"it has {whole:,} tokens, {image_tokens:,} of them for {plural(len(ranges), 'image')}, and "
                f"truncation to --context_length {encoder.context_length} would cut an image. Raise it, "
                "or set --max_pixels."
            )
        return MediaExample.of((input_ids, labels), chat.text, expanded.references, image_tokens)

    def check_text(self, input_ids: list[int]) -> None:
        """Raise BadSample if a text without images has a token that stands for an image: the model
        would look for its pixels."""
        for token in self._processor.image_token_ids:
            if token in input_ids:
                name = self._processor.tokenizer.convert_ids_to_tokens(token)
                raise BadSample(
                    f"its text has {name}, which stands for an image in this model. Remove it, or add "
                    'the image as a part or in a column "images".'
                )

    def tensors(
        self,
        samples: list[torch.Tensor],
        texts: list[str | None],
        media: list[list[str] | None],
        locations: Sequence[str],
        is_packed: bool,
    ) -> tuple[list[torch.Tensor], ImageTensors]:
        """Make the tensors of a micro-batch, see `Media.tensors`. The filler is a grey image."""
        chosen = [number for number, text in enumerate(texts) if text is not None]
        if chosen:
            paths = [media[number] or [] for number in chosen]
            images = self._open_all(paths, [locations[number] for number in chosen])
            output = self._run([texts[number] for number in chosen], images, "pt")
        else:
            samples = [*samples, self._filler.input_ids]
            chosen = [len(samples) - 1]
            output = self._run([self._filler.text], [[_grey_image()]], "pt")
        rows = output["input_ids"]
        for row, number in zip(rows, chosen, strict=True):
            if list(row)[: len(samples[number])] != samples[number].tolist():
                raise RunFailure(
                    f"{locations[number]}: its images take other tokens than when they were tokenized. "
                    f"{self._advice}"
                )
        per_token, others = _by_shape(output, rows)
        if self.by_cross_attention:
            lengths = [len(tokens) for tokens in samples]
            others = cross_attention.of_all_samples(others, chosen, lengths)
        of_examples = []
        for number, tokens in enumerate(samples):
            of_example = dict[str, torch.Tensor]()
            for name, values in per_token.items():
                if number in chosen:
                    row = torch.tensor(list(values[chosen.index(number)]))
                    of_example[name] = row[: len(tokens)].long()
                else:
                    of_example[name] = torch.zeros(len(tokens), dtype=torch.int64)
            of_examples.append(of_example)
        joined = {}
        for name in per_token:
            values = [of_example[name] for of_example in of_examples]
            if is_packed:
                joined[name] = torch.cat(values).unsqueeze(0)
            else:
                joined[name] = pad_sequence(values, batch_first=True)
        checksums = [checksums_of(paths or ()) for paths in media]
        return samples, ImageTensors(joined, others, checksums)

    def assumed(self, side: int, count: int, examples: int) -> tuple[list[list[int]], ImageTensors]:
        """Return the tokens and tensors of examples that are a message with `count` square images, for
        a plan. `side`: in pixels, before max_pixels."""
        if self._max_pixels is not None:
            side = min(side, int(self._max_pixels**0.5))
        pictures = [_grey_image(side)] * count
        output = self._run([self._text_with(count)] * examples, [pictures] * examples, "pt")
        rows = [[int(token) for token in row] for row in output["input_ids"]]
        per_token, others = _by_shape(output, rows)
        return rows, ImageTensors(
            {
                name: torch.tensor([list(row) for row in values])
                for name, values in per_token.items()
            },
            others,
        )

    def remove_incomplete(self, folder: Path) -> bool:
        """Delete tokenized samples if one needs an image of the cache that is corrupted or missing."""
        for file in sorted(folder.glob("*.arrow")):
            table = Dataset.from_file(str(file)).data
            references = table["media"].combine_chunks().flatten().unique().to_pylist()
            for reference in references:
                path = Path(reference.partition(" ")[2])
                if self.store.is_corrupted(path):
                    log.warning(f"{path}: corrupted or missing. The samples are tokenized again.")
                    shutil.rmtree(folder, ignore_errors=True)
                    return True
        return False

    def prompt(self, text: str, messages: list[Message]) -> MediaPrompt:
        """Return the tokens of a chat with images, see `image_prompt`."""
        return image_prompt(self, text, messages)

    def prompt_arguments(
        self, model: nn.Module, prompts: list[list[int]]
    ) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        """Return prompts and the further arguments of `generate`, see `Media.prompt_arguments`."""
        has_images = any(isinstance(prompt, MediaPrompt) for prompt in prompts)
        if not has_images and dist.get_world_size() == 1:
            return prompts, {}
        taken = taken_arguments(model)
        prompts, tensors = prompt_tensors(self, prompts)
        return prompts, {name: values for name, values in tensors.items() if name in taken}

    def towers_in_root(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """In the block, `generate` may compute features of images, see the function."""
        return towers_in_root(model)

    def samples_to_compare(
        self, built: BuiltModel, samples: Dataset, device: torch.device
    ) -> ImageSamples:
        """Return samples with images for `check_packing`."""
        return ImageSamples(built, samples, self, device)

    def planned(self, train: SplitStatistics, is_packed: bool) -> PlannedImages:
        """Return the images of a planned micro-batch of such samples."""
        return PlannedImages.of(train, is_packed)

    @cached_property
    def _filler_text(self) -> str:
        return self._text_with(1)

    def _text_with(self, count: int) -> str:
        tokenizer = self._processor.tokenizer
        content = [*[MediaPart("")] * count, {"type": "text", "text": "."}]
        text, _ = render_chat(
            template_for(tokenizer, None),
            tokenizer.special_tokens_map,
            [{"role": "user", "content": content}],
        )
        return text

    @cached_property
    def _placeholder(self) -> str:
        replaced, _ = self._expanded(self._filler_text, [_grey_image()])
        return placeholder_of(self._processor, replaced[0]["replacement"] if replaced else "")

    @cached_property
    def _filler(self) -> _Filler:
        text = self._filler_text
        output = self._run([text], [[_grey_image()]], "np")
        return _Filler(torch.tensor([int(token) for token in output["input_ids"][0]]), text)

    def _expanded(
        self, text: str, images: list["Image.Image"]
    ) -> tuple[list[dict[str, Any]] | None, list[int]]:
        """Return which characters of a chat the processor replaces by what, None if it does not say
        it; and its tokens."""
        if self.by_cross_attention:
            output = self._run([text], [images], "np")
            replaced = cross_attention.image_marks(text, self._processor.image_token)
        else:
            output = self._run([text], [images], "np", **REPLACEMENTS)
            replaced = output.get("text_replacement_offsets", [None])[0]
        return replaced, [int(token) for token in output["input_ids"][0]]

    def _run(
        self, texts: list[Any], images: list[list["Image.Image"]], kind: str, **options: bool
    ) -> dict[str, Any]:
        """Call the processor. Tokens are lists, images are tensors of numpy (`np`), which processes
        of the tokenization may use, or of torch (`pt`)."""
        output = self._processor(
            text=texts,
            images=images,
            # the chat template has written BOS
            text_kwargs={"add_special_tokens": False, "padding": False, "return_tensors": None},
            images_kwargs={"return_tensors": kind},
            **options,
        )
        return dict(output)

    def _open_all(
        self, references: list[list[str]], locations: list[str]
    ) -> list[list["Image.Image"]]:
        """Read the images of all samples in a few threads: decoding does not hold the GIL."""
        flat = []
        for sample, location in zip(references, locations, strict=True):
            flat += [(reference, location) for reference in sample]
        with ThreadPoolExecutor(min(DECODERS, len(flat)), "images") as pool:
            opened = iter(list(pool.map(self._open_again, flat)))
        return [[next(opened) for _ in sample] for sample in references]

    def _open_again(self, tokenized: tuple[str, str]) -> "Image.Image":
        (reference, location) = tokenized
        checksum, _, path = reference.partition(" ")
        try:
            image, actual = self._open(path)
        except BadSample as error:
            raise RunFailure(f"{location}: {error} {self._advice}") from error
        if actual != checksum:
            raise RunFailure(
                f"{location}: {path} has changed since it was tokenized. {self._advice}"
            )
        return image

    def _open(self, path: str) -> tuple["Image.Image", str]:
        """Return an image as RGB, upright, and the checksum of its file.

        Raises:
            BadSample: it cannot be read, or is a decompression bomb.
        """
        from PIL.Image import Resampling

        rgb, checksum = read_image(path)
        pixels = rgb.width * rgb.height
        if self._max_pixels is not None and pixels > self._max_pixels:
            factor = (self._max_pixels / pixels) ** 0.5
            width = max(1, int(rgb.width * factor))
            height = max(1, int(rgb.height * factor))
            rgb = rgb.resize((width, height), Resampling.BICUBIC)
        return rgb, checksum


def _by_shape(
    output: dict[str, Any], rows: list[list[int]]
) -> tuple[dict[str, list[Any]], dict[str, torch.Tensor]]:
    """Divide a processor's output into lists with a number per token, and tensors."""
    lengths = [len(row) for row in rows]
    per_token = {}
    others = {}
    for name, values in output.items():
        if name in TEXT_OUTPUTS:
            continue
        if isinstance(values, torch.Tensor):
            others[name] = values
        elif isinstance(values, list) and [len(value) for value in values] == lengths:
            per_token[name] = values
        else:
            others[name] = torch.as_tensor(values)
    return per_token, others


def _grey_image(side: int = FILLER_SIDE) -> "Image.Image":
    """Return the filler's image, a square. It is not of one color: Idefics 3 takes zeros for padding."""
    from PIL import Image

    gradient = Image.linear_gradient("L").resize((side, side))
    return gradient.convert("RGB")
