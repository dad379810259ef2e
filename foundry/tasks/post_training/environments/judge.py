"""Computation of rewards from the scores of an environment."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from foundry.config.build import build, field_of
from foundry.config.checks.targets import runtime_settings
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.generation.scoring import Answer, Environment, Judgement
from foundry.tasks.post_training.environments.worker import FaultError, Worker
from foundry.tasks.post_training.schemas.environment import reward_metric_names

_TIMEOUT_SECONDS = 10.0
_MAX_LOST = 8
"""Maximum number of processes that an environment may lose on consecutive answers before it has scored one.

After that the environment counts as broken, and each further call of the judge scores only one answer.
"""
_KEY = "environment"
log = logging.getLogger(__name__)


class Judge:
    """Computation of rewards by an environment; an error in the environment does not stop the run.

    An answer has no reward if one of its scores is missing (None), NaN or too large (`_is_number`), or if the
    environment raises, hangs or crashes on the answer. If a call with several answers fails, each of these answers is
    scored again separately.

    Args:
        scorer: an environment in this process, or a worker that runs one in a separate process.
        answers_per_call: number of answers per call of the environment.
        weights: weights of the scores, by name; the default is 1.
        name: name of the environment, for messages.
        needs: dataset columns that the environment reads.
        scores: names of the environment's scores; None if unknown.
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
        self._num_lost = 0  # number of processes lost before any answer was scored

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """Names of the metrics of scored answers; None if the names of the scores are unknown."""
        return None if self.scores is None else reward_metric_names(self.scores)

    def judge(
        self, answers: Sequence[Answer], heartbeat: Callable[[str], None] = lambda activity: None
    ) -> list[Judgement]:
        """Return the reward and scores of each answer.

        Args:
            answers: the answers to score.
            heartbeat: heartbeat, called with the name of the current activity.
        """
        judgements = self._judge(answers, self._answers_per_call, heartbeat)
        for judgement, answer in zip(judgements, answers, strict=True):
            if judgement.fault and not self._has_warned:
                self._has_warned = True
                location = f"the answer {as_text(answer.text)} to {as_text(answer.prompt)}"
                log.warning(
                    "environment %s: %s, for %s; this answer is not counted", self.name, judgement.message, location
                )
        return judgements

    def close(self) -> None:
        """Terminate the environment's process, if it has one."""
        if isinstance(self._scorer, Worker):
            self._scorer.close()

    def _judge(self, answers: Sequence[Answer], per_call: int, heartbeat: Callable[[str], None]) -> list[Judgement]:
        judgements = list[Judgement]()
        for start in range(0, len(answers), per_call):
            heartbeat("scoring answers")
            judgements += self._score(answers[start : start + per_call], heartbeat)
            if self._num_lost >= _MAX_LOST:
                return judgements + [judgements[-1]] * (len(answers) - len(judgements))
        return judgements

    def _score(self, answers: Sequence[Answer], heartbeat: Callable[[str], None]) -> list[Judgement]:
        try:
            all_scores = self._scorer.score(answers)
        except FaultError as error:
            if len(answers) > 1:
                return self._judge(answers, 1, heartbeat)
            if error.kind in ("timed_out", "died") and not self._has_scored:
                self._num_lost += 1
            return [Judgement(None, {}, error.kind, str(error))]
        self._has_scored, self._num_lost = True, 0
        return [self._weigh(scores) for scores in all_scores]

    def _weigh(self, scores: Mapping[str, float | None]) -> Judgement:
        numbers = {name: float(value) for name, value in scores.items() if value is not None and _is_number(value)}
        if invalid := [name for name, value in scores.items() if value is not None and name not in numbers]:
            value = scores[invalid[0]]
            return Judgement(None, numbers, "no_number", f"scores {invalid[0]} as {value}{_explain_value(value)}")
        if len(numbers) < len(scores) or not numbers:
            return Judgement(None, numbers)
        reward = sum(self._weights.get(name, 1.0) * value for name, value in numbers.items())
        if not _is_number(reward):
            return Judgement(
                None, numbers, "no_number", f"the weighted sum of the scores is {reward}{_explain_value(reward)}"
            )
        return Judgement(reward, numbers)


def _is_number(value: float) -> bool:
    """Return whether a value is fit for means and deviations: its square is finite in float64."""
    return math.isfinite(value * value)


def _explain_value(value: float | None) -> str:
    """Explain that a finite value is too large; empty for NaN and infinity, which need no explanation."""
    return ", whose square is not finite in float64" if value is not None and math.isfinite(value) else ""


def build_judge(node: Any) -> Judge | None:
    """Build the judge of a run from its config group `environment`; None if the run has no environment.

    User-defined environments, and built-in ones with `in_worker`, run in a separate process.

    Raises:
        ConfigError: if the environment cannot be built.
    """
    target = field_of(node, "_target_")
    if target is None:
        return None
    is_custom = not is_dataclass(node) or target != getattr(type(node), "_target_", None)
    weights = field_of(node, "weights") or {}
    name = target.rpartition(".")[2]
    names = list(node) if isinstance(node, dict) else [item.name for item in fields(node)]
    settings = {key: field_of(node, key) for key in names if key not in runtime_settings(_KEY)}
    options: dict[str, Any] = {} if is_custom else {"needs": node.needs, "scores": node.scores}
    if not is_custom and not node.in_worker:
        return Judge(build(settings), weights=weights, name=name, **options)
    try:
        worker = Worker(settings, float(field_of(node, "timeout_seconds", _TIMEOUT_SECONDS)))
    except FaultError as error:
        raise ConfigError(Violation(f"{_KEY}._target_", f"is {target}, which cannot be built: {error}")) from None
    options["answers_per_call"] = int(field_of(node, "answers_per_call", 1))
    return Judge(worker, weights=weights, name=name, **options)
