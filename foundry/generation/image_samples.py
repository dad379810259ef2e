"""Grids of generated images, for users to look at."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry.run_dir.files import replaced_atomically

CELL_PIXELS = 64
"""Minimum height of an image in the grid, in pixels."""
_MAX_NAME_LENGTH = 14


@dataclass(frozen=True)
class ImageSamples:
    """Generated images with their classes.

    Attributes:
        images: (n, channels, height, width) float32 in [-1, 1], in host memory; a single channel is drawn inverted, so
            that -1 is white.
        labels: (n,) int64.
        names: names of all classes; empty to show class numbers.
    """

    images: Tensor
    labels: Tensor
    names: tuple[str, ...] = ()

    def save(self, stem: Path) -> Path:
        """Write a grid with a labeled row for each class to `stem`.png, and return the path."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        classes = sorted(set(self.labels.tolist()))
        cell = self._cells().shape[1]
        gap = cell // 8
        grid = self._grid(classes, gap)
        height, width = grid.shape[:2]
        dpi, margin = 100, cell
        figure = Figure(figsize=((width + margin) / dpi, height / dpi), dpi=dpi, facecolor="white")
        FigureCanvasAgg(figure)
        figure.figimage(grid.numpy(), xo=margin, yo=0, origin="upper")
        for row, label in enumerate(classes):
            middle = 1 - (gap + row * (cell + gap) + cell / 2) / height
            name = self._name(label)
            size = cell * min(0.26, 1.1 / len(name))
            text = figure.text(0.5 * margin / (width + margin), middle, name, fontsize=size, color="0.25")
            text.set(ha="center", va="center", parse_math=False)
        file = Path(f"{stem}.png")
        with replaced_atomically(file) as stream:
            figure.savefig(stream, dpi=dpi, format="png")
        return file

    def _name(self, label: int) -> str:
        name = self.names[label] if self.names else str(label)
        return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 1]}…"

    def _cells(self) -> Tensor:
        """Return the images as (n, height, width, 3) float32 in [0, 1], enlarged to at least `CELL_PIXELS`."""
        brightness = (self.images.clamp(-1, 1) + 1) / 2
        if brightness.shape[1] == 1:
            brightness = (1 - brightness).expand(-1, 3, -1, -1)
        factor = max(1, -(-CELL_PIXELS // brightness.shape[2]))
        return F.interpolate(brightness, scale_factor=factor, mode="nearest").permute(0, 2, 3, 1)

    def _grid(self, classes: list[int], gap: int) -> Tensor:
        """Return the grid as an image, (height, width, 3): a row for each class, `gap` pixels between images."""
        cells = self._cells()
        rows = [cells[self.labels == label] for label in classes]
        height, width = cells.shape[1] + gap, cells.shape[2] + gap
        grid = torch.full((gap + height * len(rows), gap + width * max(map(len, rows)), 3), 0.92)
        for top, row in enumerate(rows):
            for left, image in enumerate(row):
                y, x = gap + top * height, gap + left * width
                grid[y : y + height - gap, x : x + width - gap] = image
        return grid
