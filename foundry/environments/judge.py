"""Rewards: what an environment's scores come to."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from foundry.config.build import build, field_of
from foundry.config.checks.targets import runtime_settings
from foundry.core.errors import ConfigError, Violation, shown
from foundry.environments.protocol import Answer, Environment
from foundry.environments.worker import FaultError, Worker

_TIMEOUT_SECONDS = 10.0
_MOST_LOST = 8
"""Processes that an environment may cost at answers one after the other before it has scored any; then it is broken,
and each further call of the judge tries one answer only."""
_KEY = "environment"
FAULTS = ("raised", "timed_out", "died", "no_number")
"""Why an answer has no reward although the environment was asked for one."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """What an answer is worth.

    Attributes:
        reward: the weighted sum of the scores; None: it cannot be scored.
        scores: by name; those that are no number are left out.
        fault: one of `FAULTS`; empty: none.
        message: what happened.
    """

    reward: float | None
    scores: Mapping[str, float]
    fault: str = ""
    message: str = ""


class Judge:
    """Scores answers by an environment; whatever it does, the run goes on.

    An answer has no reward if a score is None, NaN or too large (`_is_number`), or if the environment raises at it,
    hangs at it or dies of it.
    Where that happens in a call with several answers, each of them is scored again by itself.

    Args:
        scorer: an environment in this process, or one in a process of its own.
        answers_per_call: how many answers it is given at a time.
        weights: of the scores, by name; 1 where left out.
        name: of the environment, for messages.
        needs: columns that it reads.
        scores: their names; None: the environment does not say.
    """

    def __init__(
        self,
        scorer: Environment | Worker,
        *,
        weights: Mapping[str, float],
        name: str,
        needs: Sequence[str] = (),
        scores: Sequence[str] | None = None,
        answers_per_call: int = 1,
    ) -> None:
        self._scorer, self._answers_per_call = scorer, answers_per_call
        self._weights, self.name, self.needs = dict(weights), name, tuple(needs)
        self.scores = scores
        self._has_warned = self._has_scored = False
        self._lost = 0  # processes, before any answer was scored

    def judge(self, answers: Sequence[Answer], beat: Callable[[str], None] = lambda what: None) -> list[Judgement]:
        """What each answer is worth.

        Args:
            answers: to be scored.
            beat: says what is being done, to a watchdog.
        """
        found = self._judge(answers, self._answers_per_call, beat)
        for judgement, answer in zip(found, answers, strict=True):
            if judgement.fault and not self._has_warned:
                self._has_warned = True
                where = f"the answer {shown(answer.text)} to {shown(answer.prompt)}"
                log.warning("environment %s: %s, at %s; it does not count", self.name, judgement.message, where)
        return found

    def close(self) -> None:
        """End the process of the environment, where it has one."""
        if isinstance(self._scorer, Worker):
            self._scorer.close()

    def _judge(self, answers: Sequence[Answer], per_call: int, beat: Callable[[str], None]) -> list[Judgement]:
        found = list[Judgement]()
        for start in range(0, len(answers), per_call):
            beat("scoring answers")
            found += self._called(answers[start : start + per_call], beat)
            if self._lost >= _MOST_LOST:
                return found + [found[-1]] * (len(answers) - len(found))
        return found

    def _called(self, answers: Sequence[Answer], beat: Callable[[str], None]) -> list[Judgement]:
        try:
            scored = self._scorer.score(answers)
        except FaultError as error:
            if len(answers) > 1:
                return self._judge(answers, 1, beat)
            if error.kind in ("timed_out", "died") and not self._has_scored:
                self._lost += 1
            return [Judgement(None, {}, error.kind, str(error))]
        self._has_scored, self._lost = True, 0
        return [self._weighed(scores) for scores in scored]

    def _weighed(self, scores: Mapping[str, float | None]) -> Judgement:
        numbers = {name: float(value) for name, value in scores.items() if value is not None and _is_number(value)}
        if wrong := [name for name, value in scores.items() if value is not None and name not in numbers]:
            value = scores[wrong[0]]
            return Judgement(None, numbers, "no_number", f"scores {wrong[0]} as {value}{_why_none(value)}")
        if len(numbers) < len(scores) or not numbers:
            return Judgement(None, numbers)
        reward = sum(self._weights.get(name, 1.0) * value for name, value in numbers.items())
        if not _is_number(reward):
            return Judgement(None, numbers, "no_number", f"scores and weights come to {reward}{_why_none(reward)}")
        return Judgement(reward, numbers)


def _is_number(value: float) -> bool:
    """Whether a mean and a deviation can be computed of a value: its square is finite in float64."""
    return math.isfinite(value * value)


def _why_none(value: float | None) -> str:
    """Explain that a finite value is too large; empty for NaN and infinity, which explain themselves."""
    return ", whose square is not finite in float64" if value is not None and math.isfinite(value) else ""


def build_judge(node: Any) -> Judge | None:
    """The judge of a run, given its group `environment`; None where nothing scores answers.

    One of the user's own runs in a process of its own.

    Raises:
        ConfigError: the environment cannot be built.
    """
    target = field_of(node, "_target_")
    if target is None:
        return None
    is_own = not is_dataclass(node) or target != getattr(type(node), "_target_", None)
    weights = field_of(node, "weights") or {}
    name = target.rpartition(".")[2]
    names = list(node) if isinstance(node, dict) else [item.name for item in fields(node)]
    settings = {key: field_of(node, key) for key in names if key not in runtime_settings(_KEY)}
    known: dict[str, Any] = {} if is_own else {"needs": node.needs, "scores": node.scores}
    if not is_own and not node.in_worker:
        return Judge(build(settings), weights=weights, name=name, **known)
    try:
        worker = Worker(settings, float(field_of(node, "timeout_seconds", _TIMEOUT_SECONDS)))
    except FaultError as error:
        raise ConfigError(Violation(f"{_KEY}._target_", f"is {target}, which cannot be built: {error}")) from None
    known["answers_per_call"] = int(field_of(node, "answers_per_call", 1))
    return Judge(worker, weights=weights, name=name, **known)
