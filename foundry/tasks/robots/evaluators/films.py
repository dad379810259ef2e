"""Episodes as animated GIFs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundry.run_dir.files import replaced_atomically
from foundry.tasks.robots.evaluators.episodes import Film

_BORDER = 3
_RUNNING, _SOLVED, _FAILED = (200, 200, 200), (5, 150, 105), (220, 38, 38)
_COLOURS = 61
"""Number of colors for the frames; with the three border colors there are 64, so a pixel needs six bits."""
_SLOWEST_MILLISECONDS, _FASTEST_MILLISECONDS, _LAST_MILLISECONDS = 120, 20, 1500


def save_gif(films: Sequence[Film], file: Path, *, columns: int = 4) -> None:
    """Write films side by side; at the end of a film its border turns green, or red without success.

    Args:
        films: films with frames of the same size.
        file: path of the GIF.
        columns: films per row.
    """
    from PIL import Image

    every, longest = max(film.every for film in films), max(max(film.frames) for film in films)
    grids = [_grid(films, length, columns) for length in range(0, longest + every, every)]
    sample = np.concatenate([grids[0], grids[len(grids) // 2], grids[-1]])
    colours = Image.fromarray(sample).quantize(_COLOURS).getpalette() or []
    borders = [*_RUNNING, *_SOLVED, *_FAILED]
    palette = Image.new("P", (1, 1))
    palette.putpalette([*colours[: 3 * _COLOURS], *borders])
    # Without dithering, static pixels are equal in all frames and compress to nothing.
    frames = [Image.fromarray(grid).quantize(palette=palette, dither=Image.Dither.NONE) for grid in grids]
    milliseconds = 1000 * every / films[0].fps
    duration = round(min(max(milliseconds, _FASTEST_MILLISECONDS), _SLOWEST_MILLISECONDS))
    durations = [duration] * (len(frames) - 1) + [_LAST_MILLISECONDS]
    with replaced_atomically(file) as stream:
        frames[0].save(stream, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)


def _grid(films: Sequence[Film], length: int, columns: int) -> NDArray[np.uint8]:
    """Return one image of all films after `length` actions; a finished film shows its last frame."""
    size = len(films[0].frames[0])
    tile = size + 2 * _BORDER
    columns = min(columns, len(films))
    grid = np.full((-(-len(films) // columns) * tile, columns * tile, 3), _RUNNING, dtype=np.uint8)
    for index, film in enumerate(films):
        row, column = divmod(index, columns)
        cell = grid[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        if length >= max(film.frames):
            cell[:] = _SOLVED if film.success else _FAILED
        cell[_BORDER:-_BORDER, _BORDER:-_BORDER] = film.frames[max(n for n in film.frames if n <= length)]
    return grid
