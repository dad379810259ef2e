"""Proposals of a search: the values of a trial depend only on the sampler, its seed and the trials that it saw.

The sampler never reads the study of the search. It gets a study in memory with the trials of a `View`. The view is
recorded with the trial, so the same proposal can be computed again at any time.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from foundry.config.checks.optuna_parts import build_part
from foundry.core.errors import ConfigError, Violation

VIEW = "saw"
"""Attribute of a trial that contains its view."""

RUNG = "rung"
"""Attribute of a trial that has reached a rung: the number of its target rung."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Earlier trials that a proposal saw.

    Attributes:
        ended: numbers of the trials whose results it saw.
        running: numbers of the trials whose values it saw, but no result.
        rungs: number of rungs whose values it saw, of each running trial that has reached a rung.
        sampler: attributes that samplers keep in the study, such as the position in a quasi-random sequence.
    """

    ended: frozenset[int]
    running: frozenset[int]
    rungs: Mapping[int, int] = field(default_factory=dict)
    sampler: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> "View":
        """Return the view of the first trial."""
        return cls(ended=frozenset(), running=frozenset())

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial], number: int, keys: Iterable[str], sampler: Mapping[str, Any]) -> "View":
        """Return the view of trial `number`: the earlier trials that have ended or have a value for each key."""
        earlier = [trial for trial in trials if trial.number < number]
        ended = [trial.number for trial in earlier if trial.state.is_finished()]
        running = [trial for trial in earlier if is_running(trial) and set(keys) <= trial.params.keys()]
        return cls(
            ended=frozenset(ended),
            running=frozenset(trial.number for trial in running),
            rungs={trial.number: len(trial.intermediate_values) for trial in running if RUNG in trial.user_attrs},
            sampler=dict(sampler),
        )

    @classmethod
    def recorded(cls, attribute: Mapping[str, Any]) -> "View":
        """Return the view in the attribute of a trial."""
        ended, running = (frozenset(_parse_ranges(attribute[name])) for name in ("ended", "running"))
        rungs = {int(number): count for number, count in attribute.get("rungs", {}).items()}
        return cls(ended=ended, running=running, rungs=rungs, sampler=attribute.get("sampler", {}))

    def as_recorded(self) -> dict[str, Any]:
        """Return the attribute of a trial; ranges of numbers keep it short, for databases that limit its length."""
        recorded: dict[str, Any] = {"ended": _format_ranges(self.ended), "running": _format_ranges(self.running)}
        more: dict[str, Any] = {
            "rungs": {str(number): count for number, count in self.rungs.items()},
            "sampler": dict(self.sampler),
        }
        return recorded | {name: value for name, value in more.items() if value}


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Values that a sampler proposes for a trial.

    Attributes:
        params: value of each key.
        trial_attrs: attributes that the sampler keeps in the trial.
        study_attrs: attributes that the sampler keeps in the study.
    """

    params: Mapping[str, Any]
    trial_attrs: Mapping[str, Any]
    study_attrs: Mapping[str, Any]


class Proposer:
    """Computes proposals.

    Args:
        sampler: `_target_` and arguments of the sampler.
        direction: "minimize" or "maximize".
        distributions: distribution of each key.
    """

    def __init__(
        self, sampler: Mapping[str, Any], direction: str, distributions: Mapping[str, BaseDistribution]
    ) -> None:
        self._sampler, self._direction, self.distributions = sampler, direction, dict(distributions)

    def propose(self, number: int, trials: Sequence[FrozenTrial], view: View) -> Proposal:
        """Propose the values of trial `number`.

        Args:
            number: number of the trial.
            trials: trials of the search, which include the trials of the view.
            view: trials that the sampler sees.

        Raises:
            ConfigError: if the sampler cannot be built.
        """
        storage = optuna.storages.InMemoryStorage()
        study = optuna.create_study(
            study_name=VIEW,
            storage=storage,
            sampler=self.build(number),
            direction=StudyDirection[self._direction.upper()],
        )
        study_id = storage.get_study_id_from_name(VIEW)
        for name, value in view.sampler.items():
            storage.set_study_system_attr(study_id, name, value)
        by_number = {trial.number: trial for trial in trials}
        study.add_trials(_seen(by_number.get(earlier), view) for earlier in range(number))
        params = study.ask(self.distributions).params
        (trial,) = study.get_trials(deepcopy=False)[number:]
        return Proposal(
            params=params, trial_attrs=trial.system_attrs, study_attrs=storage.get_study_system_attrs(study_id)
        )

    def replay(self, number: int, trials: Sequence[FrozenTrial]) -> Proposal:
        """Propose the values of an existing trial again, from the view that is recorded in it."""
        return self.propose(number, trials, View.recorded(trials[number].user_attrs[VIEW]))

    def build(self, number: int) -> optuna.samplers.BaseSampler:
        """Build the sampler of trial `number`; its seed, if it has one, depends only on the search's seed and `number`.

        Raises:
            ConfigError: if the class does not exist or does not accept the arguments.
        """
        node, seed = self._sampler, self._sampler.get("seed")
        if seed is not None:
            # Hash seed and number: with their sum, seed + 1 would propose the same points as seed, one trial earlier.
            digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
            node = {**node, "seed": int.from_bytes(digest[:4])}
        sampler: optuna.samplers.BaseSampler = build("sampler", node)
        return sampler


def build(name: str, node: Mapping[str, Any]) -> Any:
    """Build the sampler or the pruner of a search.

    Raises:
        ConfigError: if the class does not exist or does not accept the arguments.
    """
    try:
        return build_part(name, node)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error.__cause__ or error).splitlines()[:2])
        raise ConfigError(Violation(f"hydra.sweeper.{name}", f"cannot be built: {text}")) from None


def is_running(trial: FrozenTrial) -> bool:
    """Return whether a trial has no result yet."""
    return trial.state is TrialState.RUNNING


def _seen(trial: FrozenTrial | None, view: View) -> FrozenTrial:
    """Return a trial as the sampler sees it.

    A trial outside of the view is a failed one without values. A running trial that has reached a rung is a pruned one,
    because samplers learn from the values of pruned trials only.
    """
    if trial is not None and trial.number in view.ended:
        return trial
    if trial is None or trial.number not in view.running:
        return optuna.trial.create_trial(state=TrialState.FAIL)
    rungs = range(1, view.rungs.get(trial.number, 0) + 1)
    return optuna.trial.create_trial(
        state=TrialState.PRUNED if rungs else TrialState.RUNNING,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,
        intermediate_values={rung: trial.intermediate_values[rung] for rung in rungs},
    )


def _format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as "0-4,6"."""
    ranges = list[list[int]]()
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _parse_ranges(text: str) -> Iterable[int]:
    """Yield the numbers of a text that `_format_ranges` returned."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
