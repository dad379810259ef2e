"""Resizing of rendered images."""

import numpy as np
from numpy.typing import NDArray


def resized(picture: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return the central square of an image (height, width, 3), resized to (size, size, 3) with a box filter."""
    from PIL import Image

    height, width = picture.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = picture[top : top + side, left : left + side]
    if side == size:
        return square.copy()
    return np.asarray(Image.fromarray(square).resize((size, size), Image.Resampling.BOX))
