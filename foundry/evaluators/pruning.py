"""Ending a trial of a search that promises less than the others did at the same share of the run."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundry.config.checks.optuna_parts import build_part
from foundry.config.packages import pip_command
from foundry.core.errors import ConfigError, Violation
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.names import TRIAL
from foundry.run_dir.trial import TrialLink, open_storage

log = logging.getLogger(__name__)

STEPS = 1000
"""Pruners of Optuna count in thousandths of a run, so that runs with other batch sizes can be compared."""


class Pruning:
    """Reports the evaluations of a trial to its study, and asks the study's pruner whether the trial is to continue.

    The file of the study is read by rank 0; the others are told. Every rank makes the same calls.

    Attributes:
        reason: why the trial has been ended; None while it continues.
    """

    def __init__(self, link: TrialLink | None, run_dir: Path, world: World) -> None:
        self._world = world
        self._trial = None if link is None else _Trial(link, run_dir)
        self.reason: str | None = None

    @classmethod
    def of(cls, run_dir: Path, world: World) -> "Pruning | None":
        """What rank 0's run directory asks for; None where the run is to go to its end.

        Raises:
            ConfigError: rank 0 has no Optuna, or the directory's trial.json is none that a search has written.
        """
        try:
            link = TrialLink.load(run_dir) if world.is_main else None
        except (ValueError, OSError) as error:
            raise _refused(run_dir, error) from None
        return cls(link, run_dir, world) if gather(link is not None, world)[0] else None

    def update(self, metrics: Mapping[str, float], epoch: int, share: float) -> str | None:
        """Take in an evaluation.

        Args:
            metrics: by their names in metrics.jsonl.
            epoch: it does not matter.
            share: of the run that is done, from 0 to 1; at the end there is nothing to be ended.

        Returns:
            Why the run is to stop; None: it continues.
        """
        if share >= 1:
            return None
        reason = None if self._trial is None else self._trial.judge(metrics, share)
        self.reason = gather(reason, self._world)[0]
        return self.reason

    def result(self) -> dict[str, Any]:
        """Why the trial was ended, if it was; the search reads it."""
        return {"pruned": self.reason}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the study remembers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is to be loaded."""


class _Trial:
    """The study's side, on rank 0."""

    def __init__(self, link: TrialLink, run_dir: Path) -> None:
        try:
            import optuna
        except ImportError:
            message = f"proposed this run but is not installed here; {pip_command('optuna', 'search')}"
            raise ConfigError(Violation("hydra/sweeper=optuna", message)) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._metric, self._number = link.metric, link.number
        try:
            self._pruner: optuna.pruners.BasePruner = build_part("pruner", link.pruner)
            storage = open_storage(link.resolve_journal(run_dir))
            self._study = optuna.load_study(study_name=link.study, storage=storage)
        except (TypeError, ValueError, KeyError) as error:
            raise _refused(run_dir, error) from None

    def judge(self, metrics: Mapping[str, float], share: float) -> str | None:
        """Report a value; why the trial is to end, if it is."""
        from optuna.trial import Trial

        value = metrics.get(self._metric)
        if value is None:  # the search says so itself, of the first result
            return None
        try:
            known = self._study.get_trials(deepcopy=False)[self._number]
            trial, step = Trial(self._study, known._trial_id), round(STEPS * share)
            if step not in known.intermediate_values:  # else it is done again after going back to a checkpoint
                trial.report(value, step)
            with warnings.catch_warnings():
                # numpy's, if a trial has reported nothing but NaN; the pruner then ends it.
                warnings.filterwarnings("ignore", "All-NaN slice encountered")
                is_over = self._pruner.prune(self._study, self._study.get_trials(deepcopy=False)[self._number])
        except OSError as error:
            log.warning("the search cannot be asked whether to continue (%s); the run does", error)
            return None
        text = f"pruned: {self._metric} {value:.4g} at {share:.0%} of the run promises less than other trials"
        return text if is_over else None


def _refused(run_dir: Path, error: Exception) -> ConfigError:
    message = f"is {run_dir}, whose {TRIAL} asks for what no search of foundry's does: {error}; remove that file"
    return ConfigError(Violation("hydra.run.dir", message))
