"""Reading and writing of images and videos."""

from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.packages import pip_command
from foundry.config.schemas.data import PictureFit
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.files import UnsafeFileError, require_regular

_FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""File name suffixes of images, in lower case."""
_MAX_PIXELS = 2**28

Pixels = NDArray[np.uint8]
"""Image, (height, width, 3) uint8, RGB."""


def decode_picture(content: bytes, size: tuple[int, int]) -> Pixels:
    """Decode an image file of a known size, which is checked before the pixels are decoded.

    Args:
        content: bytes of a PNG, JPEG or WebP file.
        size: expected height and width in pixels.

    Raises:
        ValueError: the content is not an image, or the image has another size.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as picture:
            if picture.size != size[::-1]:
                raise ValueError(f"is {picture.size[1]} by {picture.size[0]} pixels, not {size[0]} by {size[1]}")
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is not an image: {error}") from None


def unreadable(error: OSError | ValueError) -> str:
    """Return the predicate of a message about an unreadable image, such as `cannot be read: Input/output error`.

    Args:
        error: exception of `read_picture`. A message that is a predicate already, such as `is not an image`, is kept.
    """
    is_predicate = isinstance(error, (UnsafeFileError, ValueError))
    reason = getattr(error, "strerror", None) or str(error)
    return reason if is_predicate else f"cannot be read: {reason}"


def read_picture(file: Path, *, size: int, channels: int, fit: PictureFit) -> Pixels:
    """Read an image as (channels, size, size) uint8, with EXIF orientation applied and transparency made white.

    Args:
        file: PNG, JPEG or WebP file.
        size: height and width of the result in pixels.
        channels: 3 for RGB, 1 for grayscale.
        fit: how to make a non-square image square.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not an image, or the image has more than 2**28 pixels.
    """
    from PIL import Image, ImageOps

    try:
        with require_regular(file).open("rb") as stream, Image.open(stream, formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"has {image.width} by {image.height} pixels, which is too many")
            image.draft("RGB", (size, size))  # decodes a JPEG at 1/2, 1/4 or 1/8 scale if that is large enough
            picture = ImageOps.exif_transpose(image)
            if picture.mode.startswith("I"):  # 16-bit grayscale, which Pillow would clip at 255
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            if picture.has_transparency_data:
                rgba = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
            picture = picture.convert("RGB" if channels == 3 else "L")
    except OSError as error:
        if error.strerror is not None:  # an error of the operating system, not of Pillow
            raise
        raise ValueError(f"is not an image: {error}") from None
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is not an image: {error}") from None
    box = None
    if fit is PictureFit.crop:
        side = min(picture.size)
        left, top = (picture.width - side) / 2, (picture.height - side) / 2
        box = (left, top, left + side, top + side)
    pixels = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0))
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def encode_png(picture: Pixels) -> bytes:
    """Return the image as the content of a PNG file (lossless)."""
    from PIL import Image

    stream = BytesIO()
    Image.fromarray(picture).save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


def fitted(picture: Pixels, size: int) -> Pixels:
    """Resize an image to (3, size, size) by bilinear interpolation with antialiasing.

    A non-square image is stretched, not cropped.
    """
    from PIL import Image

    if picture.shape[:2] != (size, size):
        picture = np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR))
    return picture.transpose(2, 0, 1)


def video_frames(file: Path) -> Iterator[tuple[float, Callable[[], Pixels]]]:
    """Yield the frames of a video in order: the time in seconds, and a function that returns the image.

    Raises:
        ConfigError: the package that decodes videos (av) is not installed.
        OSError: the file cannot be read.
        ValueError: the file is not a video.
    """
    av = import_av()
    try:
        with av.open(str(require_regular(file))) as container:
            for frame in container.decode(video=0):
                yield float(frame.time), partial(frame.to_ndarray, format="rgb24")
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"not a video: {error}") from None


def import_av() -> Any:
    """Import and return `av`, the package that reads and writes videos.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import av
    except ImportError:
        message = f"is a column of videos, which require av; {pip_command('av', 'video')}"
        raise ConfigError(Violation("data.image_key", message)) from None
    return av
