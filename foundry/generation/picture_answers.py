"""Figures of a model's answers to questions about images."""

import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foundry.run_dir.files import replaced_atomically

_COLUMNS = 4
_CELL_INCHES = 2.2
_LINE, _MOST_LINES = 34, 2
"""Characters in a line of text under an image, and maximum number of lines of each text."""
_RIGHT, _WRONG = "#1a7f37", "#b42318"


@dataclass(frozen=True)
class PictureAnswers:
    """Questions about images with the model's answers.

    Attributes:
        images: (n, 3, height, width) uint8, in host memory.
        questions: last user turn of each prompt.
        answers: the model's answers.
        truths: reference answers; None if unknown.
    """

    images: Tensor
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    truths: tuple[str | None, ...]

    @property
    def text(self) -> str:
        """All questions with their answers and reference answers, separated by empty lines."""
        return "\n\n".join("\n".join(lines) for lines in self._lines())

    def save(self, stem: Path) -> Path:
        """Write the images with question, answer and reference answer (if known) to `stem`.png, and return the path."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = min(_COLUMNS, len(self.answers))
        rows = -(-len(self.answers) // columns)
        size = (columns * _CELL_INCHES, rows * _CELL_INCHES * 1.45)
        figure = Figure(figsize=size, dpi=120, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        cells = figure.subplots(rows, columns, squeeze=False).flatten()
        for cell in cells:
            cell.axis("off")
        for cell, image, lines, answer, truth in zip(
            cells, self.images, self._lines(), self.answers, self.truths, strict=False
        ):
            cell.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            title = "\n".join("\n".join(_wrap(line)) for line in lines)
            colour = "0.15" if truth is None else _RIGHT if answer.strip() == truth.strip() else _WRONG
            text = cell.set_title(title, y=-0.03, va="top", fontsize=7, color=colour)
            text.set_parse_math(False)
        file = Path(f"{stem}.png")
        with replaced_atomically(file) as stream, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # characters that the font lacks are drawn as boxes
            figure.savefig(stream, dpi=120, format="png")
        return file

    def _lines(self) -> list[list[str]]:
        """Return the lines of text under each image."""
        blocks = list[list[str]]()
        for question, answer, truth in zip(self.questions, self.answers, self.truths, strict=True):
            blocks.append([question, f"answer: {answer}", *([] if truth is None else [f"reference: {truth}"])])
        return blocks


def _wrap(text: str) -> list[str]:
    """Wrap a text to the lines that fit under an image."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(printable, _LINE, max_lines=_MOST_LINES, placeholder=" ...") or [""]
