"""Scores of answers compared with their reference."""

import pytest

from foundry.generation.scoring import Answer
from foundry.tasks.post_training.environments.matching import Arithmetic, ExactMatch, Format, MultipleChoice
from foundry.tasks.post_training.environments.python import Python


def scores(environment, text, answer=None):
    columns = {} if answer is None else {"answer": answer}
    (found,) = environment.score([Answer(text, columns=columns)])
    return tuple(found.values())


@pytest.mark.parametrize(
    ("environment", "text", "answer", "expected"),
    [
        (ExactMatch(), " Paris\n", "Paris", (1.0,)),
        (ExactMatch(), "paris", "Paris", (0.0,)),
        (ExactMatch(ignore_case=True), "paris", "Paris", (1.0,)),
        (ExactMatch(), "anything", None, (None,)),
        (ExactMatch(pattern=r"<a>(.*?)</a>"), "<a>1</a> no, <a>2</a>", 2, (1.0, 1.0)),
        (ExactMatch(pattern=r"<a>(.*?)</a>"), "2", "2", (0.0, 0.0)),
        (MultipleChoice(), "Not A. It is (B).", "B", (1.0, 1.0)),
        (MultipleChoice(), "B", 1, (1.0, 1.0)),
        (MultipleChoice(), "Bananas", "B", (0.0, 0.0)),
        (MultipleChoice(choices="XY"), "Y", "A", (None, 1.0)),
        (MultipleChoice(pattern="[(](.*)[)]"), "(AB)", "A", (0.0, 0.0)),
        (MultipleChoice(pattern="[(](.*)[)]"), "()", "A", (0.0, 0.0)),
        (Format(pattern=r"<b>.*</b>"), "<b>two\nlines</b>\n", None, (1.0,)),
        (Format(pattern=r"<b>.*</b>"), "so: <b>x</b>", None, (0.0,)),
        (Arithmetic(), "7+8=15. Answer: 85", "85", (1.0, 1.0)),
        (Arithmetic(), "Answer: 85 or so", "7+8=15. Answer: 85", (1.0, 0.0)),
        (Arithmetic(), "Answer: 185", "85", (0.0, 1.0)),
        (Arithmetic(), "85", "85", (0.0, 0.0)),
        (Arithmetic(), "Answer: 85", "no number", (None, 1.0)),
        (Python(), "def f():\n    return 1\n", None, (1.0,)),
        (Python(), "Here:\n```python\nx = 1\n```\nDone.", None, (1.0,)),
        (Python(), "x =", None, (0.0,)),
        (Python(), " \n", None, (0.0,)),
        (Python(), "(" * 10_000, None, (0.0,)),
        (Python(), "x = '\0'", None, (0.0,)),
    ],
)
def test_matching_environment_scores(environment, text, answer, expected):
    assert scores(environment, text, answer) == expected
