"""Environment that scores whether an answer is valid Python."""

import ast
import re
import warnings
from collections.abc import Sequence

from foundry.generation.scoring import Answer, Scores

_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)


class Python:
    """Environment that scores `parses` if Python can parse the answer, or its code blocks between ``` if it has any.

    The code is not executed. Since the parser may exhaust the stack of its process, it runs in a separate process.
    """

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """Return `parses` for each answer: 1 if it is valid Python, else 0."""
        return [{"parses": float(_parses(answer.text))} for answer in answers]


def _parses(text: str) -> bool:
    fenced = _FENCED.findall(text)
    code = "\n".join(fenced) if fenced else text
    if not code.strip():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
