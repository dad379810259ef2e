"""`environment=`: reward function that scores completions."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.setting import setting
from foundry.core.errors import Violation, nearest, shown


def _parse_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        ValueError: the text is not a valid regular expression.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"is {text!r}, which is no regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class NoEnvironment:
    """Nothing scores answers."""

    _target_: str | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Base class of environment settings. The reward is the weighted sum of a completion's scores.

    Attributes:
        needs: columns of a row that the environment reads, in addition to the prompt.
        in_worker: run the environment in a separate process with a time limit.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    in_worker: ClassVar[bool] = False

    _target_: str
    weights: dict[str, float] = setting(
        dict,
        "of the scores in the reward, by name, such as {correct: 1, format: 0.1}; 1 where it is left out",
        runtime=True,
    )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct",)

    def check(self) -> Iterator[Violation]:
        """Check that all weights are finite and belong to existing scores."""
        yield from check_weights(self.weights)
        for name in self.weights:
            if name not in self.scores:
                message = f"is no score of this environment, which has {', '.join(self.scores)}"
                yield Violation(f"environment.weights.{name}", f"{message}{nearest(name, self.scores)}")


def check_weights(weights: Mapping[str, float]) -> Iterator[Violation]:
    """Check that all weights are finite."""
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield Violation(f"environment.weights.{name}", f"is {shown(weight)} but must be finite")


@dataclass(frozen=True, kw_only=True)
class InWorker(Environment):
    """Base class of settings of environments that run in a separate process with a time limit.

    User-defined environments always run this way. The built-in subclasses do because matching a regular expression
    can take time exponential in the length of the completion.
    """

    in_worker: ClassVar[bool] = True

    timeout_seconds: float = setting(
        10.0,
        "longest time of a call that scores answers, after which they do not count",
        gt=0,
        le=10**6,
        runtime=True,
    )
    answers_per_call: int = setting(
        1,
        "answers that are scored in one call, as by a reward model; each of them again by itself where that fails",
        ge=1,
        le=2**31,
        runtime=True,
    )


@dataclass(frozen=True, kw_only=True)
class ExactMatch(InWorker):
    """The answer is the row's `answer`, but for white space around it."""

    needs: ClassVar[tuple[str, ...]] = ("answer",)

    _target_: str = "foundry.rewards.ExactMatch"
    pattern: str | None = setting(
        None,
        "regular expression whose last match, or its first group, is the answer within the text; that it matches is "
        "scored as `format`; null: the whole text is the answer",
        parse=_parse_pattern,
    )
    ignore_case: bool = setting(False, "whether upper and lower case are the same")

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct",) if self.pattern is None else ("correct", "format")


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(InWorker):
    """The last choice that the answer names is the row's `answer`: its letter, or its number from 0."""

    needs: ClassVar[tuple[str, ...]] = ("answer",)

    _target_: str = "foundry.rewards.MultipleChoice"
    choices: str = setting("ABCD", "the letters of the choices")
    pattern: str | None = setting(
        None,
        "regular expression whose last match, or its first group, is the letter; null: a letter that stands alone",
        parse=_parse_pattern,
    )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct", "format")


@dataclass(frozen=True, kw_only=True)
class Format(InWorker):
    """The answer matches a regular expression."""

    _target_: str = "foundry.rewards.Format"
    pattern: str = setting("???", "regular expression that the whole answer is to match", parse=_parse_pattern)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("format",)


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Environment):
    """The number after `Answer:` is the right one, as in data=arithmetic."""

    needs: ClassVar[tuple[str, ...]] = ("answer",)

    _target_: str = "foundry.rewards.Arithmetic"
    weights: dict[str, float] = setting(
        lambda: {"correct": 1.0, "format": 0.1},
        "of the scores in the reward, by name; 1 where it is left out",
        runtime=True,
    )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct", "format")


@dataclass(frozen=True, kw_only=True)
class Python(InWorker):
    """The answer, or the code between ``` in it, is Python that can be parsed; it is never run."""

    _target_: str = "foundry.rewards.Python"

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("parses",)
