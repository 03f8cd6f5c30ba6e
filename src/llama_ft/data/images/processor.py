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
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)

from llama_ft.config import DataConfig
from llama_ft.data.chat.chat_template import Span, render_chat, template_for
from llama_ft.data.chat.expansion import Expansion, placeholder_of, without_spans
from llama_ft.data.chat.loss_mask import RenderedChat
from llama_ft.data.images import cross_attention
from llama_ft.data.images.image_files import read_image
from llama_ft.data.images.image_parts import ImageStore, have_images, image_paths
from llama_ft.data.read.formats import BadSample, ImagePart, Message
from llama_ft.data.read.sources import SAMPLES_LOOKED_AT, Source
from llama_ft.errors import RunFailure, UserError, reason

if TYPE_CHECKING:  # PIL is imported for images only: not every environment has it
    from PIL import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

FILLER_SIDE = 64  # pixels
# Settings of image processors that enlarge a smaller image, in pixels of a side or of the image
SMALLEST_SIZES = ("height", "width", "shortest_edge", "min_pixels")
MOST_PIXELS = 10**8
DECODERS = 4  # threads that decode images of a micro-batch
FILES_WITH_CLASS = (
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "config.json",
)
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


def load_processor(
    folder: Path,
    model_config: "PretrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    trust_remote_code: bool = False,
) -> Any:
    """Return the processor of a model's directory with this tokenizer. Code of the directory's own
    image processor runs only with `trust_remote_code`.

    It is AutoProcessor's class and settings, with two differences. Images are read and resized by
    PIL, also if torchvision is installed, so that pixels do not depend on the machine. And there is
    no video processor: those of Qwen-VL and others need torchvision.

    Raises:
        UserError: the directory has no processor, or it cannot be used.
    """
    try:
        kind: Any = _processor_class(_class_name(folder, model_config))
        module = sys.modules[kind.__module__]
        if vars(module).get("num2words", str) is None:
            module.num2words = str  # type: ignore[attr-defined]  # SmolVLM calls it for videos only

        class ImagesOnly(kind):
            @classmethod
            def get_attributes(cls) -> Any:
                return kind.get_attributes()

            @classmethod
            def _get_arguments_from_pretrained(cls, name: str, *_: Any, **__: Any) -> list[Any]:
                images = AutoImageProcessor.from_pretrained(
                    name, backend="pil", trust_remote_code=trust_remote_code
                )
                _check_sizes(images.to_dict())
                parts = {"tokenizer": tokenizer, "image_processor": images}
                return [parts.get(attribute) for attribute in cls.get_attributes()]

            def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
                if argument is None:
                    return None
                return super().check_argument_for_proper_class(name, argument)

        return ImagesOnly.from_pretrained(folder)
    # Transformers raises many classes here, with one meaning for the user
    except Exception as error:
        files = [name for name in FILES_WITH_CLASS[:2] if (folder / name).is_file()]
        expected = "" if files else f"\nExpected {' or '.join(FILES_WITH_CLASS[:2])}."
        raise UserError(
            f"{folder}: samples have images, and the processor of this model cannot be used "
            f"({reason(error)}).{expected}"
        ) from error


def _check_sizes(settings: dict[str, Any]) -> None:
    """Raise ValueError if an image processor would enlarge every image to more than MOST_PIXELS,
    which takes hours or all memory."""
    for group in (settings, *(part for part in settings.values() if isinstance(part, dict))):
        for name in SMALLEST_SIZES:
            value = group.get(name)
            if isinstance(value, int | float) and value > MOST_PIXELS:
                raise ValueError(
                    f"{name} of its images is {value:,}; expected at most {MOST_PIXELS:,}"
                )


def _class_name(folder: Path, model_config: "PretrainedConfig") -> str:
    """Return the name of the processor's class, found as AutoProcessor finds it."""
    for name in FILES_WITH_CLASS:
        file = folder / name
        if file.is_file():
            found = json.loads(file.read_text()).get("processor_class")
            if found:
                return str(found)
    known = PROCESSOR_MAPPING_NAMES.get(model_config.model_type)
    if known is None:
        raise ValueError(f"no processor is known for model_type {model_config.model_type}")
    return str(known)


def _processor_class(name: str) -> Any:
    """Return a processor's class.

    Without torchvision, Transformers has only a placeholder for Pixtral's, because its file imports one
    function of a file that imports torchvision. The file for PIL has that function, too.
    """
    kind: Any = processor_class_from_name(name)
    if kind is None:
        raise ValueError("Transformers does not have its class")
    if kind.__module__ in sys.modules:
        return kind
    for model_type, known in PROCESSOR_MAPPING_NAMES.items():
        package = f"transformers.models.{model_type}"
        if known != name or find_spec(f"{package}.image_processing_pil_{model_type}") is None:
            continue
        with_torchvision = f"{package}.image_processing_{model_type}"
        sys.modules[with_torchvision] = import_module(
            f"{package}.image_processing_pil_{model_type}"
        )
        try:
            return getattr(import_module(f"{package}.processing_{model_type}"), name)
        finally:
            del sys.modules[with_torchvision]
    raise ValueError(f"{name} needs torchvision")


class ImageExample(tuple[list[int], list[int]]):
    """Tokens and labels of a sample with images, and what its pixels are made from.

    Attributes:
        text: the rendered chat with one mark per image, as the processor takes it.
        images: a checksum and the path of each image, with a space between.
        image_tokens: number of tokens that stand for images.
        end_of_images: number of tokens up to the last one that stands for an image.
    """

    text: str
    images: list[str]
    image_tokens: int
    end_of_images: int

    @classmethod
    def of(
        cls,
        input_ids: list[int],
        labels: list[int],
        *,
        text: str,
        images: list[str],
        image_tokens: int,
        end_of_images: int,
    ) -> "ImageExample":
        example = cls((input_ids, labels))
        example.text = text
        example.images = images
        example.image_tokens = image_tokens
        example.end_of_images = end_of_images
        return example


class ExpandedChat(NamedTuple):
    """A chat in which images have their tokens."""

    chat: RenderedChat
    inserted: list[Span]  # characters that stand for images
    input_ids: list[int]  # as the processor tokenizes it
    references: list[str]  # see `ImageExample.images`


@dataclass(frozen=True)
class ImageTensors:
    """What a processor makes of a micro-batch, in addition to tokens, by its own names."""

    # int64, with the shape of the batch's input_ids: which tokens stand for images
    per_token: dict[str, torch.Tensor]
    # pixels, and numbers per image
    others: dict[str, torch.Tensor]
    # of the images of each example; empty of one without images
    checksums: list[bytes] = field(default_factory=list)


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

    def with_store(self, store: ImageStore) -> "Images":
        """Return the same reader of images with another store."""
        return Images(self._processor, store, self._max_pixels)

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
        paths = image_paths(messages)
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
        references: list[list[str] | None],
        locations: Sequence[str],
        is_packed: bool,
    ) -> tuple[list[torch.Tensor], "ImageTensors"]:
        """Make the tensors of a micro-batch.

        Args:
            samples: tokens of each sample, int64 [tokens].
            texts, references: of samples with images, else None; see `ImageExample`.
            locations: place of each sample, for messages.
            is_packed: the examples become one sequence; else a padded batch.

        Returns:
            The tokens of all examples, which are the samples, and the filler if none has an image;
            and the tensors.

        Raises:
            RunFailure: an image has changed since it was tokenized.
        """
        chosen = [number for number, text in enumerate(texts) if text is not None]
        if chosen:
            paths = [references[number] or [] for number in chosen]
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
            made = dict[str, torch.Tensor]()
            for name, values in per_token.items():
                if number in chosen:
                    row = torch.tensor(list(values[chosen.index(number)]))
                    made[name] = row[: len(tokens)].long()
                else:
                    made[name] = torch.zeros(len(tokens), dtype=torch.int64)
            of_examples.append(made)
        joined = {}
        for name in per_token:
            values = [made[name] for made in of_examples]
            if is_packed:
                joined[name] = torch.cat(values).unsqueeze(0)
            else:
                joined[name] = pad_sequence(values, batch_first=True)
        checksums = [checksums_of(paths or ()) for paths in references]
        return samples, ImageTensors(joined, others, checksums)

    def assumed(
        self, side: int, count: int, examples: int
    ) -> tuple[list[list[int]], "ImageTensors"]:
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

    @cached_property
    def _filler_text(self) -> str:
        return self._text_with(1)

    def _text_with(self, count: int) -> str:
        tokenizer = self._processor.tokenizer
        content = [*[ImagePart("")] * count, {"type": "text", "text": "."}]
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
            image, found = self._open(path)
        except BadSample as error:
            raise RunFailure(f"{location}: {error} {self._advice}") from error
        if found != checksum:
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


def checksums_of(references: Sequence[str]) -> bytes:
    """Return the checksums of images, without their paths: a run may resume with its data in another
    directory."""
    return "".join(reference.partition(" ")[0] for reference in references).encode()


def open_images(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    load_processor: Callable[[], Any],
    cache: Path,
) -> tuple[Images | None, str]:
    """Load the model's processor if one of the first samples has an image; else say why images are
    not supported. The processor's chat template is the tokenizer's, if the tokenizer has none."""
    parts = [part for source in sources for part in source.parts or (source,)]
    if not any(have_images(part.first_samples) for part in parts):
        return None, f"none of the first {SAMPLES_LOOKED_AT} samples has one; put one of them first"
    store = ImageStore(cache, is_full=config.streaming)
    images = Images(load_processor(), store, config.max_pixels)
    if not tokenizer.chat_template:
        tokenizer.chat_template = images.chat_template
    return images, ""
