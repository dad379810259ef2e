"""Whether an answer is Python."""

import ast
import re
import warnings
from collections.abc import Sequence

from foundry.environments.protocol import Answer, Scores

_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)


class Python:
    """`parses` where the answer is source text that Python can parse: the code between ``` where there is any.

    Nothing of it is run. Its parser may exhaust the stack of its process, so it has one of its own.
    """

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """1 or 0 for each answer."""
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
