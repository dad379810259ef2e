"""Pictures of recordings: files of them, and videos."""

from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.errors import ConfigError, Violation

_FORMATS = ("PNG", "JPEG", "WEBP")

Pixels = NDArray[np.uint8]
"""(height, width, 3) uint8, red, green and blue."""


def decode_picture(content: bytes, size: tuple[int, int] | None = None) -> Pixels:
    """A file of a picture, of the height and width that are known before it is decoded; None: of any.

    Raises:
        ValueError: it is none, or of another size.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as picture:
            if size is not None and picture.size != size[::-1]:
                raise ValueError(f"is {picture.size[1]} by {picture.size[0]} pixels, not {size[0]} by {size[1]}")
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is no picture: {error}") from None


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
        with av.open(str(file)) as container:
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
        message = "names a column of videos, which are decoded by av; pip install 'foundry[video]'"
        raise ConfigError(Violation("data.image_key", message)) from None
    return av
