"""Answers about pictures, to look at."""

import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foundry.run_dir.files import replaced_atomically

_COLUMNS = 4
_CELL_INCHES = 2.2
_LINE, _MOST_LINES = 34, 2
"""Letters of a line of text under a picture, and lines of each text."""
_RIGHT, _WRONG = "#1a7f37", "#b42318"


@dataclass(frozen=True)
class PictureAnswers:
    """Questions about pictures and what the model answers.

    Attributes:
        images: (n, 3, height, width) uint8, in host memory.
        questions: each what was asked last.
        answers: the model's.
        truths: the right ones, None where they are not known.
    """

    images: Tensor
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    truths: tuple[str | None, ...]

    @property
    def text(self) -> str:
        """All questions with their answers, an empty line between two."""
        return "\n\n".join("\n".join(lines) for lines in self._lines())

    def save(self, stem: Path) -> Path:
        """Write `stem`.png: the pictures with question, answer and, where it is known, the right one; the file."""
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
            shown = "\n".join("\n".join(_wrapped(line)) for line in lines)
            colour = "0.15" if truth is None else _RIGHT if answer.strip() == truth.strip() else _WRONG
            text = cell.set_title(shown, y=-0.03, va="top", fontsize=7, color=colour)
            text.set_parse_math(False)
        file = Path(f"{stem}.png")
        with replaced_atomically(file) as stream, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a script that the font has not is drawn as boxes
            figure.savefig(stream, dpi=120, format="png")
        return file

    def _lines(self) -> list[list[str]]:
        """What is said about each picture."""
        found = list[list[str]]()
        for question, answer, truth in zip(self.questions, self.answers, self.truths, strict=True):
            found.append([question, f"answer: {answer}", *([] if truth is None else [f"right: {truth}"])])
        return found


def _wrapped(text: str) -> list[str]:
    """A text as the few lines that there is room for."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(printable, _LINE, max_lines=_MOST_LINES, placeholder=" ...") or [""]
