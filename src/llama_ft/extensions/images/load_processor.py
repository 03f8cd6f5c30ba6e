"""Load a model's own processor, for images only. Nothing here knows a model family."""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)

from llama_ft.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Settings of image processors that enlarge a smaller image, in pixels of a side or of the image
SMALLEST_SIZES = ("height", "width", "shortest_edge", "min_pixels")
MOST_PIXELS = 10**8
FILES_WITH_CLASS = (
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "config.json",
)


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
            class_name = json.loads(file.read_text()).get("processor_class")
            if class_name:
                return str(class_name)
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
