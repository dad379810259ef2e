"""Episodes as moving pictures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundry.run_dir.files import replaced_atomically
from foundry.tasks.robots.evaluators.episodes import Film

_BORDER = 3
_RUNNING, _SOLVED, _FAILED = (200, 200, 200), (5, 150, 105), (220, 38, 38)
_COLOURS = 61
"""Besides those of the borders; with theirs a pixel has six bits."""
_SLOWEST_MILLISECONDS, _FASTEST_MILLISECONDS, _LAST_MILLISECONDS = 120, 20, 1500


def save_gif(films: Sequence[Film], file: Path, *, columns: int = 4) -> None:
    """Write films beside each other; at its end the border of each turns green, or red without success.

    Args:
        films: of the same size.
        file: to write.
        columns: films in a row.
    """
    from PIL import Image

    every, longest = max(film.every for film in films), max(max(film.frames) for film in films)
    shown = [_grid(films, length, columns) for length in range(0, longest + every, every)]
    sample = np.concatenate([shown[0], shown[len(shown) // 2], shown[-1]])
    colours = Image.fromarray(sample).quantize(_COLOURS).getpalette() or []
    borders = [*_RUNNING, *_SOLVED, *_FAILED]
    palette = Image.new("P", (1, 1))
    palette.putpalette([*colours[: 3 * _COLOURS], *borders])
    # Without dithering what stands still is the same in every frame, and takes no bytes.
    frames = [Image.fromarray(grid).quantize(palette=palette, dither=Image.Dither.NONE) for grid in shown]
    real = 1000 * every / films[0].fps
    each = round(min(max(real, _FASTEST_MILLISECONDS), _SLOWEST_MILLISECONDS))
    durations = [each] * (len(frames) - 1) + [_LAST_MILLISECONDS]
    with replaced_atomically(file) as stream:
        frames[0].save(stream, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)


def _grid(films: Sequence[Film], length: int, columns: int) -> NDArray[np.uint8]:
    """One picture of them all after `length` actions; a film that is over shows its last frame."""
    size = len(films[0].frames[0])
    tile = size + 2 * _BORDER
    columns = min(columns, len(films))
    grid = np.full((-(-len(films) // columns) * tile, columns * tile, 3), _RUNNING, dtype=np.uint8)
    for place, film in enumerate(films):
        row, column = divmod(place, columns)
        cell = grid[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        if length >= max(film.frames):
            cell[:] = _SOLVED if film.success else _FAILED
        cell[_BORDER:-_BORDER, _BORDER:-_BORDER] = film.frames[max(n for n in film.frames if n <= length)]
    return grid
