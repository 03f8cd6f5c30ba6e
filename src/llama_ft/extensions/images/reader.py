"""What the core asks of this extension before it has a reader of images: see `MediaReader`."""

from pathlib import Path

from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import DataConfig
from llama_ft.data.media import MediaModel
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.extensions.images.image_prompts import thumbnail
from llama_ft.extensions.images.load_processor import load_processor
from llama_ft.extensions.images.planned_images import PlannedImages
from llama_ft.extensions.images.processor import Images
from llama_ft.extensions.images.samples.image_parts import ImageStore, with_image_parts
from llama_ft.extensions.images.towers.cross_attention_layers import keep_cross_attention_apart
from llama_ft.extensions.images.towers.trained_parts import choose_trained_parts
from llama_ft.extensions.images.towers.without_waits import encode_without_waits


class ImageReader:
    """The images of samples, prompts and plans."""

    thumbnail = staticmethod(thumbnail)
    choose_trained = staticmethod(choose_trained_parts)

    @staticmethod
    def prepare_towers(model: PreTrainedModel) -> None:
        """Change a model on the meta device with its towers, see `MediaReader`."""
        keep_cross_attention_apart(model)
        encode_without_waits(model)

    @staticmethod
    def load(model: MediaModel, config: DataConfig, cache: Path) -> Images:
        """Load what reads images, see `MediaReader`."""
        tokenizer = model.tokenizer
        processor = load_processor(model.folder, model.config, tokenizer, model.trust_remote_code)
        store = ImageStore(cache, is_full=config.streaming)
        images = Images(processor, store, config.max_pixels)
        if not tokenizer.chat_template:
            tokenizer.chat_template = images.chat_template
        return images

    @staticmethod
    def with_parts(sample: Sample, sample_format: SampleFormat, cache: Path) -> Sample:
        """Return a sample whose images are parts of its messages, see `with_image_parts`."""
        return with_image_parts(sample, sample_format, ImageStore(cache))

    @staticmethod
    def planned(per_example: int = 1, tokens: int | None = None) -> PlannedImages:
        """Return the images of a planned micro-batch."""
        return PlannedImages(per_example, tokens)
