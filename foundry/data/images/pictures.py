"""Pictures of recordings: files of them, and videos."""

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
"""Of the names of such files, in lower case."""
_MOST_PIXELS = 2**28

Pixels = NDArray[np.uint8]
"""(height, width, 3) uint8, red, green and blue."""


def decode_picture(content: bytes, size: tuple[int, int]) -> Pixels:
    """A file of a picture, of which the height and width are known before it is decoded.

    Raises:
        ValueError: it is none, or of another size.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as picture:
            if picture.size != size[::-1]:
                raise ValueError(f"is {picture.size[1]} by {picture.size[0]} pixels, not {size[0]} by {size[1]}")
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is no picture: {error}") from None


def read_picture(file: Path, *, size: int, channels: int, fit: PictureFit) -> Pixels:
    """A file of a picture, turned as its camera says, as (channels, size, size); what is transparent becomes white.

    Args:
        file: PNG, JPEG or WebP.
        size: height and width in pixels.
        channels: 3: red, green and blue; 1: grey.
        fit: what becomes of a picture that is not square.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no picture, or larger than 2**28 pixels.
    """
    from PIL import Image, ImageOps

    try:
        with require_regular(file).open("rb") as stream, Image.open(stream, formats=_FORMATS) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise ValueError(f"has {opened.width} by {opened.height} pixels, which are too many")
            opened.draft("RGB", (size, size))  # a JPEG is decoded at half its size and so on, where that suffices
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            if picture.has_transparency_data:
                drawn = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn)
            picture = picture.convert("RGB" if channels == 3 else "L")
    except (FileNotFoundError, UnsafeFileError):
        raise
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is no picture: {error}") from None
    box = None
    if fit is PictureFit.crop:
        side = min(picture.size)
        left, top = (picture.width - side) / 2, (picture.height - side) / 2
        box = (left, top, left + side, top + side)
    pixels = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0))
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def encode_png(picture: Pixels) -> bytes:
    """A picture as a PNG file, which loses nothing."""
    from PIL import Image

    stream = BytesIO()
    Image.fromarray(picture).save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


def fitted(picture: Pixels, size: int) -> Pixels:
    """A picture as (3, size, size), by bilinear interpolation over all pixels that a new one covers.

    One that is not square is stretched, so that nothing of it is lost.
    """
    from PIL import Image

    if picture.shape[:2] != (size, size):
        picture = np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR))
    return picture.transpose(2, 0, 1)


def video_frames(file: Path) -> Iterator[tuple[float, Callable[[], Pixels]]]:
    """The frames of a video in their order: at which second each is, and what makes a picture of it.

    Raises:
        ConfigError: the package that decodes videos is missing.
        OSError: the file cannot be read.
        ValueError: it is no video.
    """
    av = import_av()
    try:
        with av.open(str(require_regular(file))) as container:
            for frame in container.decode(video=0):
                yield float(frame.time), partial(frame.to_ndarray, format="rgb24")
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"it is no video: {error}") from None


def import_av() -> Any:
    """The package that reads and writes videos.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import av
    except ImportError:
        message = f"names a column of videos, which are decoded by av; {pip_command('av', 'video')}"
        raise ConfigError(Violation("data.image_key", message)) from None
    return av
