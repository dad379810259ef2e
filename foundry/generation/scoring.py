"""Scoring of a model's answers: protocols of environments and of the judge that computes rewards from their scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

REWARD = "reward"
"""Name of the metric with the mean reward, and prefix of the names of all metrics from scores."""
Scores = Mapping[str, float | None]
"""Scores of an answer by name; None or NaN if a score cannot be determined."""


@dataclass(frozen=True)
class Answer:
    """Completion of a prompt by a model.

    Attributes:
        text: the completion, without its stop token.
        prompt: the prompt as the model received it.
        columns: columns of the prompt's row, such as `answer`.
        is_truncated: whether the completion ended at a length limit instead of a stop token.
    """

    text: str
    prompt: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_truncated: bool = False


class Environment(Protocol):
    """Protocol of an environment, which scores each answer independently, so that batching has no effect."""

    def score(self, answers: Sequence[Answer]) -> Sequence[Scores]:
        """Return the scores of each answer, by name.

        A user-defined environment receives one answer per call by default.
        """
        ...


@dataclass(frozen=True)
class Judgement:
    """Reward and scores of an answer.

    Attributes:
        reward: weighted sum of the scores; None if the answer cannot be scored.
        scores: scores by name; scores that are not finite numbers are omitted.
        fault: raised, timed_out, died or no_number; empty if there was no fault.
        message: description of the fault.
    """

    reward: float | None
    scores: Mapping[str, float]
    fault: str = ""
    message: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """Values by metric name; each metric is averaged over the answers with a value. `reward_missing` is 0 or 1."""
        values = {f"{REWARD}_{name}": value for name, value in self.scores.items()}
        values[f"{REWARD}_missing"] = float(self.reward is None)
        return values if self.reward is None else {**values, REWARD: self.reward}


class Judge(Protocol):
    """Protocol of the judge of a run, which computes rewards from the scores of its environment.

    Attributes:
        name: name of the environment, for messages.
        needs: columns of a prompt's row that the environment reads.
    """

    name: str
    needs: tuple[str, ...]

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """Names in `Judgement.metrics`; None if unknown."""
        ...

    def judge(self, answers: Sequence[Answer], heartbeat: Callable[[str], None] = ...) -> Sequence[Judgement]:
        """Return the reward and scores of each answer; `heartbeat` is called with the name of the current activity."""
        ...

    def close(self) -> None:
        """Free the resources of the environment."""
        ...
