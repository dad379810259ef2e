"""Pruning: ends a trial of a search that is worse than other trials at the same fraction of the run."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.config.checks.optuna_parts import build_part
from foundry.config.packages import pip_command
from foundry.core.errors import ConfigError, Violation
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.names import TRIAL
from foundry.run_dir.study_storage import VARIABLE, StorageError, ended_trial_error, open_storage, outages
from foundry.run_dir.trial import SHARED, TrialLink

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

STEPS = 1000
"""Number of pruner steps in a run: a step is a thousandth of the run, so that batch sizes do not matter."""


class Pruning:
    """Stop rule that reports a trial's evaluations to its Optuna study, and stops the run if the pruner decides to.

    Only rank 0 opens the study's file, and it broadcasts the decision. Every rank must make the same calls.

    Attributes:
        reason: reason to end the trial; None while it continues.
    """

    def __init__(self, link: TrialLink | None, run_dir: Path, world: World) -> None:
        self._world = world
        self._trial = None if link is None else _Trial(link, run_dir)
        self.reason: str | None = None

    @classmethod
    def of(cls, run_dir: Path, world: World) -> "Pruning | None":
        """Return the pruner for rank 0's run directory; None if no search started the run.

        Raises:
            ConfigError: Optuna is not installed on rank 0, or the directory's trial.json is invalid.
        """
        try:
            link = TrialLink.load(run_dir) if world.is_main else None
        except (ValueError, OSError) as error:
            raise _config_error(run_dir, error) from None
        return cls(link, run_dir, world) if gather(link is not None, world)[0] else None

    def update(self, metrics: Mapping[str, float], epoch: int, share: float) -> str | None:
        """Update with an evaluation.

        Args:
            metrics: metrics by their names in metrics.jsonl.
            epoch: unused.
            share: fraction of the run completed, from 0 to 1; a completed run is not pruned.

        Returns:
            The reason to stop the run, or None to continue.
        """
        if share >= 1:
            return None
        reason = None if self._trial is None else self._trial.judge(metrics, share)
        self.reason = gather(reason, self._world)[0]
        return self.reason

    def result(self) -> dict[str, Any]:
        """Return the reason to end the trial, or None, as `pruned`; the search reads it."""
        return {"pruned": self.reason}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the state is in the study."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the state is in the study."""


class _Trial:
    """A trial of an Optuna study, opened on rank 0."""

    def __init__(self, link: TrialLink, run_dir: Path) -> None:
        try:
            import optuna
        except ImportError:
            message = f"created this run but is not installed here; {pip_command('optuna', 'search')}"
            raise ConfigError(Violation("hydra/sweeper=optuna", message)) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._link = link
        self._study: optuna.Study | None = None
        try:
            self._pruner: optuna.pruners.BasePruner = build_part("pruner", link.pruner)
            self._location = link.location(run_dir)
            if link.journal != SHARED:
                self._open()
        except (TypeError, ValueError, KeyError) as error:
            raise _config_error(run_dir, error) from None

    def _open(self) -> "optuna.Study":
        """Return the study, opened at the first call: a shared storage may not respond when the run starts."""
        import optuna

        if not self._location:
            raise StorageError(f"the environment variable {VARIABLE} is not set")
        if self._study is None:
            self._study = optuna.load_study(study_name=self._link.study, storage=open_storage(self._location))
        return self._study

    def judge(self, metrics: Mapping[str, float], share: float) -> str | None:
        """Report the study's metric at this fraction of the run; return the reason to end the trial, or None."""
        from optuna.trial import Trial

        value = metrics.get(self._link.metric)
        if value is None:  # the search itself fails after its first result if the runs do not measure its metric
            return None
        number = self._link.number
        try:
            study = self._open()
            frozen_trial = study.get_trials(deepcopy=False)[number]
            trial, step = Trial(study, frozen_trial._trial_id), round(STEPS * share)
            if step not in frozen_trial.intermediate_values:  # reported already if the run repeats it after a rollback
                trial.report(value, step)
            with warnings.catch_warnings():
                # numpy's warning if a trial has reported only NaN; the pruner then ends the trial.
                warnings.filterwarnings("ignore", "All-NaN slice encountered")
                is_over = self._pruner.prune(study, study.get_trials(deepcopy=False)[number])
        except (StorageError, ended_trial_error(), *outages()) as error:  # type: ignore[misc]
            log.warning("cannot read whether the search prunes this run (%s); the run continues", error)
            return None
        text = f"pruned: {self._link.metric} {value:.4g} at {share:.0%} of the run is worse than other trials"
        return text if is_over else None


def _config_error(run_dir: Path, error: Exception) -> ConfigError:
    message = f"is {run_dir}, whose {TRIAL} is not valid for a search of foundry: {error}; remove that file"
    return ConfigError(Violation("hydra.run.dir", message))
