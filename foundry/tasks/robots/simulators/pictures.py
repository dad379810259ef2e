"""Pictures of simulators."""

import numpy as np
from numpy.typing import NDArray


def resized(picture: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The middle square of a picture, (height, width, 3), as (size, size, 3): each pixel the mean of what it covers."""
    from PIL import Image

    height, width = picture.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = picture[top : top + side, left : left + side]
    if side == size:
        return square.copy()
    return np.asarray(Image.fromarray(square).resize((size, size), Image.Resampling.BOX))
