"""Read an image file as 8-bit RGB. PIL is imported for images only: not every environment has it."""

import warnings
from typing import TYPE_CHECKING, BinaryIO

import numpy
import xxhash

from llama_ft.data.read.formats import BadSample
from llama_ft.errors import reason

if TYPE_CHECKING:
    from PIL import Image

# as Image.MAX_IMAGE_PIXELS: above, PIL warns of a decompression bomb
LARGEST_IMAGE = 89_478_485  # pixels
# Of the long side to the short one. Qwen-VL's processors have this limit. Others enlarge the short
# side: a file of 1 x 100,000 pixels, 200 bytes, would become one of 34 GB.
LARGEST_RATIO = 200
PIECE_BYTES = 2**20  # of a file, read at once
WIDE_PIXELS = ("I", "F")  # PIL's modes of 32 bits


def read_image(path: str) -> tuple["Image.Image", str]:
    """Return an image as RGB, upright, and the checksum of its file. It is the first frame of an
    animation.

    Raises:
        BadSample: it cannot be read, or its size or format is not supported.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings(), open(path, "rb") as file:
            warnings.simplefilter("ignore")
            image = Image.open(file, formats=_formats())
            _check_size(path, *image.size)
            checksum = _checksum(file)
            upright: Image.Image = ImageOps.exif_transpose(image)
            return _to_rgb(path, upright), checksum
    except BadSample:
        raise
    except UnidentifiedImageError:
        raise BadSample(f"{path} cannot be read as an image (in no format of Pillow).") from None
    # PIL raises many classes for broken files: SyntaxError, struct.error, DecompressionBombError
    except Exception as error:
        raise BadSample(f"{path} cannot be read as an image ({reason(error)}).") from None


def _checksum(file: BinaryIO) -> str:
    """Return the checksum of a file, and leave its position as it is. A file may be larger than
    memory."""
    position = file.tell()
    file.seek(0)
    checksum = xxhash.xxh3_64()
    while piece := file.read(PIECE_BYTES):
        checksum.update(piece)
    file.seek(position)
    return checksum.hexdigest()


def _formats() -> list[str]:
    """Return the formats that PIL reads itself. For EPS it starts Ghostscript, which runs the
    program that the file is."""
    from PIL import Image

    Image.init()
    return [name for name in Image.ID if name != "EPS"]


def _check_size(path: str, width: int, height: int) -> None:
    if width * height > LARGEST_IMAGE:
        raise BadSample(
            f"{path} has {width:,} x {height:,} pixels; expected at most {LARGEST_IMAGE:,} in all."
        )
    if max(width, height) > LARGEST_RATIO * min(width, height):
        raise BadSample(
            f"{path} has {width:,} x {height:,} pixels; expected one side to be at most "
            f"{LARGEST_RATIO} times the other."
        )


def _to_rgb(path: str, image: "Image.Image") -> "Image.Image":
    """Convert an image. PIL's own conversion makes everything above 255 white."""
    from PIL.Image import fromarray

    if image.mode in WIDE_PIXELS:
        raise BadSample(f"{path} has 32 bits per pixel and channel; expected 8 or 16. Convert it.")
    if image.mode.startswith("I;16"):
        values = numpy.asarray(image).astype(numpy.uint16)
        image = fromarray((values >> 8).astype(numpy.uint8))
    return image.convert("RGB")
