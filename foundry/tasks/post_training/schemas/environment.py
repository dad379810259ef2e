"""`environment=`: the scores and rewards of the model's completions."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.setting import setting
from foundry.core.errors import Violation, as_text, nearest


def _parse_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        ValueError: the text is not a valid regular expression.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"is {text!r}, which is not a valid regular expression: {error}") from None


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
        "weights of the scores in the reward, such as {correct: 1, format: 0.1}; 1 for scores that are left out",
        runtime=True,
    )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of scored completions."""
        return reward_metric_names(self.scores)

    def check(self) -> Iterator[Violation]:
        """Check that all weights are finite and belong to existing scores."""
        yield from check_weights(self.weights)
        for name in self.weights:
            if name not in self.scores:
                message = f"is not a score of this environment, which has {', '.join(self.scores)}"
                yield Violation(f"environment.weights.{name}", f"{message}{nearest(name, self.scores)}")


def reward_metric_names(scores: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the metrics of scored completions, given the names of their scores."""
    return ("reward", *(f"reward_{name}" for name in scores), "reward_missing")


def check_weights(weights: Mapping[str, float]) -> Iterator[Violation]:
    """Check that all weights are finite."""
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield Violation(f"environment.weights.{name}", f"is {as_text(weight)} but must be finite")


@dataclass(frozen=True, kw_only=True)
class InWorker(Environment):
    """Base class of settings of environments that run in a separate process with a time limit.

    User-defined environments always run this way. The built-in subclasses do because matching a regular expression
    can take time exponential in the length of the completion, and parsing code can crash the process.
    """

    in_worker: ClassVar[bool] = True

    timeout_seconds: float = setting(
        10.0,
        "timeout of a scoring call; on expiry its completions do not count",
        gt=0,
        le=10**6,
        runtime=True,
    )
    answers_per_call: int = setting(
        1,
        "completions scored in one call, for example by a reward model; if the call fails, each is scored again "
        "separately",
        ge=1,
        le=2**31,
        runtime=True,
    )


@dataclass(frozen=True, kw_only=True)
class ExactMatch(InWorker):
    """Exact match of the completion with the row's `answer`, except for surrounding white space."""

    needs: ClassVar[tuple[str, ...]] = ("answer",)

    _target_: str = "foundry.rewards.ExactMatch"
    pattern: str | None = setting(
        None,
        "regular expression that extracts the answer from the completion: its last match, or the first group of "
        "that; whether it matches is scored as `format`; null: the whole completion is the answer",
        parse=_parse_pattern,
    )
    ignore_case: bool = setting(False, "ignore case")

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct",) if self.pattern is None else ("correct", "format")


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(InWorker):
    """Comparison of the last choice in the completion with the row's `answer`, a letter or a number from 0."""

    needs: ClassVar[tuple[str, ...]] = ("answer",)

    _target_: str = "foundry.rewards.MultipleChoice"
    choices: str = setting("ABCD", "letters of the choices")
    pattern: str | None = setting(
        None,
        "regular expression that extracts the letter from the completion: its last match, or the first group of "
        "that; null: a letter that stands alone",
        parse=_parse_pattern,
    )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct", "format")


@dataclass(frozen=True, kw_only=True)
class Format(InWorker):
    """Match of the completion with a regular expression."""

    _target_: str = "foundry.rewards.Format"
    pattern: str = setting("???", "regular expression that the whole completion must match", parse=_parse_pattern)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("format",)


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Environment):
    """Comparison of the number after `Answer:` with the row's `answer`, as in data=arithmetic."""

    needs: ClassVar[tuple[str, ...]] = ("answer",)

    _target_: str = "foundry.rewards.Arithmetic"
    weights: dict[str, float] = setting(
        lambda: {"correct": 1.0, "format": 0.1},
        "weights of the scores in the reward; 1 for scores that are left out",
        runtime=True,
    )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("correct", "format")


@dataclass(frozen=True, kw_only=True)
class Python(InWorker):
    """Check that the completion, or the code between ``` in it, is valid Python; the code is parsed but never run."""

    _target_: str = "foundry.rewards.Python"

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("parses",)
