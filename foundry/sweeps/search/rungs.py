"""Rungs of a search with successive halving: pauses and promotions of its trials, recorded in the study.

The intermediate values of a trial are its values at the rungs, by the number of the rung. An attribute of the trial is
the number of its target rung: the trial trains until it reaches that rung, and waits there for the next one. So each
decision depends on the study alone, and the study contains it before it has an effect.
"""

from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from foundry.config.schemas.asha import ASHA
from foundry.run_dir.result import read_result
from foundry.run_dir.rung import Rung, end_paused_run
from foundry.run_dir.status import read_status
from foundry.sweeps.search.promotion import Climb, next_promotion
from foundry.sweeps.search.proposals import RUNG
from foundry.sweeps.search.study import SearchStudy


class Rungs:
    """Rungs of the trials of a search.

    Args:
        asha: settings of successive halving.
        study: study of the search.
        metric: metric that the search compares.
        minimize: whether lower values are better.
    """

    def __init__(self, asha: ASHA, study: SearchStudy, *, metric: str, minimize: bool) -> None:
        self._asha, self._study, self._metric, self._minimize = asha, study, metric, minimize

    def paused(self) -> list[int]:
        """Return the numbers of the trials that wait at a rung."""
        return [trial.number for trial in self._study.trials() if _is_paused(trial)]

    def promote(self) -> int | None:
        """Choose the next paused trial to continue, and record the decision; None if all paused trials have to wait."""
        climbs = [_climb(trial) for trial in self._study.trials()]
        number = next_promotion(climbs, reduction_factor=self._asha.reduction_factor, minimize=self._minimize)
        if number is not None:
            self._study.set_attribute(number, RUNG, len(climbs[number].values) + 1)
        return number

    def link(self, number: int, run_dir: Path) -> None:
        """Write the target rung of a trial to its run directory."""
        rung = _target(self._study.trials()[number])
        length = self._asha.length(rung)
        Rung(number=rung, at=None if length is None else length.text, metric=self._metric).save(run_dir)

    def is_reached(self, number: int, run_dir: Path) -> bool:
        """Return whether the run of a trial is paused at the target rung, or at a higher one."""
        return _rung_of(run_dir) >= _target(self._study.trials()[number])

    def report(self, number: int, run_dir: Path, value: float) -> None:
        """Record the value of a trial at the rung of its paused run.

        A trial that shares its run with an equal, earlier trial has the values of that trial at the lower rungs.
        """
        trials, rung = self._study.trials(), _rung_of(run_dir)
        trial = trials[number]
        values = {rung: value}
        for twin in trials:
            if twin.params == trial.params:
                values = twin.intermediate_values | values
        self._study.report(number, {at: values.get(at, value) for at in range(1, rung + 1)})
        self._study.set_attribute(number, RUNG, rung)

    def prune(self, number: int, run_dir: Path) -> None:
        """End a paused trial as pruned, at the end of the search.

        Its run may have finished for an equal trial; the run then keeps its result.
        """
        if read_status(run_dir).get("state") == "paused":
            share = f"the best 1/{self._asha.reduction_factor} of its rung"
            end_paused_run(run_dir, f"pruned: {read_status(run_dir).get('reason', '')} is not among {share}")
        self._study.tell(number, state=TrialState.PRUNED)


def _rung_of(run_dir: Path) -> int:
    """Return the rung of a paused run; 0 for any other run."""
    if read_status(run_dir).get("state") != "paused":
        return 0
    rung = read_result(run_dir).get("rung")
    return rung if isinstance(rung, int) else 0


def _target(trial: FrozenTrial) -> int:
    """Return the number of the target rung of a trial."""
    return int(trial.user_attrs.get(RUNG, 1))


def _is_paused(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.RUNNING and len(trial.intermediate_values) == _target(trial)


def _climb(trial: FrozenTrial) -> Climb:
    values = trial.intermediate_values
    return Climb(
        trial=trial.number,
        values=tuple(values[rung] for rung in sorted(values)),
        is_paused=_is_paused(trial),
        has_failed=trial.state is TrialState.FAIL,
    )
