"""The study of a search: its properties and its trials, in a storage of Optuna."""

import functools
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from foundry.config.schemas.sweeper import Wait
from foundry.launch.ledger import say
from foundry.run_dir.study_storage import ended_trial_error, first_line, outages
from foundry.sweeps.search.commands import COMMAND, Commands
from foundry.sweeps.search.proposals import VIEW, Proposal, Proposer, View, is_running

_FACTS = "facts"
_WAIT = "wait"
_SHARED = "shared"
_RUN_DIR = "run_dir"
_STOPPED = "stopped"
_RETRY_SECONDS = 1.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class StudyUnreachable(Exception):
    """The storage does not respond, and the user has interrupted the wait for it."""


def _patient(
    method: Callable[Concatenate["SearchStudy", _P], _T],
) -> Callable[Concatenate["SearchStudy", _P], _T]:
    """Decorate a method that uses the storage: if the storage does not respond, wait and call the method again."""

    def call(self: "SearchStudy", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        has_warned = False
        while True:
            try:
                result = method(self, *args, **kwargs)
            except outages() as error:
                if self.commands is None:  # a file in the sweep directory, like the run directories
                    raise
                self.commands.note_outage()
                if not has_warned:
                    say(
                        f"the storage of the search does not respond, the search waits: {first_line(error)}", sys.stderr
                    )
                has_warned = True
                if self.is_interrupted():
                    raise StudyUnreachable from None
                time.sleep(_RETRY_SECONDS)
            else:
                if has_warned:
                    say("the storage of the search responds again", sys.stderr)
                return result

    functools.update_wrapper(call, method)
    return call


class SearchStudy:
    """A study that exists in the storage.

    Attributes:
        name: name of the study.
        commands: the commands that share the study; None if it belongs to the sweep directory.
        is_interrupted: returns whether the search must not wait for a storage that does not respond.
    """

    def __init__(self, storage: BaseStorage, name: str, commands: Commands | None = None) -> None:
        self.name, self.commands = name, commands
        self.is_interrupted: Callable[[], bool] = lambda: False
        self._storage = storage
        self._study = optuna.load_study(study_name=name, storage=storage)
        self._id = storage.get_study_id_from_name(name)

    @classmethod
    def find(cls, storage: BaseStorage, name: str) -> "SearchStudy | None":
        """Return the study with this name; None if no search has created it."""
        return cls(storage, name) if name in optuna.get_all_study_names(storage) else None

    @classmethod
    def create(
        cls,
        storage: BaseStorage,
        name: str,
        direction: str,
        facts: Mapping[str, str],
        wait: Wait,
        commands: Commands | None = None,
    ) -> "SearchStudy":
        """Return the study with this name; create it if it does not exist."""
        optuna.create_study(
            study_name=name, storage=storage, direction=StudyDirection[direction.upper()], load_if_exists=True
        )
        study = cls(storage, name, commands)
        # An earlier version, which recorded no facts, created a study with trials. Read the trials before the facts:
        # another command may record the facts and add trials in between.
        is_old = bool(study.trials())
        if study.facts is None:
            study._study.set_user_attr(_WAIT, Wait.batch.value if is_old else wait.value)
            study._study.set_user_attr(_SHARED, commands is not None)
            study._study.set_user_attr(_FACTS, dict(facts))  # last: a study without them is not complete
        return study

    @property
    def facts(self) -> dict[str, str] | None:
        """Properties of the search that never change; None if the process that created the study was killed."""
        return self._study.user_attrs.get(_FACTS)

    @property
    def wait(self) -> Wait | None:
        """How the search proposes jobs; None if the process that created the study was killed."""
        attributes = self._study.user_attrs
        # Studies of versions without this attribute are searches with batches.
        return Wait(attributes.get(_WAIT, Wait.batch.value)) if _FACTS in attributes else None

    @property
    def is_shared(self) -> bool:
        """Whether several commands may work on the study."""
        return bool(self._study.user_attrs.get(_SHARED, False))

    @_patient
    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order of their numbers; they must not be modified."""
        return self._study.get_trials(deepcopy=False)

    @_patient
    def interrupted(self, busy: Collection[int], limit: int, n_trials: int) -> list[int]:
        """Return the numbers of running trials that this command must continue.

        They include trials of commands that are gone, which this command takes over.

        Args:
            busy: trials that are not returned.
            limit: maximum number of trials.
            n_trials: number of trials of the search.
        """
        trials = [trial for trial in self._running(n_trials) if trial.number not in busy]
        if self.commands is None:
            return [trial.number for trial in trials][:limit]
        owners = self.commands.owners(trials)
        numbers = [number for number, owner in owners.items() if owner == self.commands.me]
        gone = self.commands.gone(owners.values())
        for trial in trials:
            owner = owners[trial.number]
            if len(numbers) < limit and owner in gone and self.commands.claim(trial, owner):
                numbers.append(trial.number)
        return numbers[:limit]

    @_patient
    def awaits_others(self, n_trials: int) -> bool:
        """Return whether other commands run trials, which this command must take over if those commands are gone."""
        if self.commands is None:
            return False
        trials = [trial for trial in self._running(n_trials) if not trial.user_attrs.get(_STOPPED)]
        return any(owner != self.commands.me for owner in self.commands.owners(trials).values())

    @_patient
    def note_start(self, number: int, run_dir: Path) -> None:
        """Record the run directory of a trial that starts, for a command that takes over the trial.

        If another command has taken over the trial, nothing is recorded.
        """
        if self.commands is not None and self._is_mine(number):
            self.set_attribute(number, _RUN_DIR, str(run_dir.absolute()))
            self.set_attribute(number, _STOPPED, False)

    @_patient
    def note_stop(self, number: int) -> None:
        """Record that the job of a trial was stopped, so that other commands do not wait for the trial.

        If another command has taken over the trial, nothing is recorded.
        """
        if self.commands is not None and self._is_mine(number):
            self.set_attribute(number, _STOPPED, True)

    def run_dir(self, number: int) -> Path | None:
        """Return the last run directory of a trial; None if it was not, or is not shared."""
        recorded = self.trials()[number].user_attrs.get(_RUN_DIR)
        return None if recorded is None else Path(recorded)

    @_patient
    def add_trial(self) -> int:
        """Add a trial without values, and return its number."""
        attributes = {} if self.commands is None else {COMMAND: self.commands.me}
        template = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        return self._storage.get_trial_number_from_id(self._storage.create_new_trial(self._id, template))

    @_patient
    def complete(self, number: int, proposer: Proposer) -> bool:
        """Propose the missing values of a trial, and record them with the trials that the proposal saw.

        A trial that has all values stays as it is. If the process is killed in between, the next call proposes the
        same values, because it uses the recorded view.

        Returns:
            Whether this command owns the trial; if another command has taken it over, no values are recorded.

        Raises:
            ConfigError: if the sampler cannot be built.
        """
        trials = self.trials()
        trial = trials[number]
        missing = {key: value for key, value in proposer.distributions.items() if key not in trial.params}
        if not missing:
            return self._is_mine(number)
        if VIEW not in trial.user_attrs:
            attributes = self._storage.get_study_system_attrs(self._id)
            view = View.of(trials, number, proposer.distributions, attributes)
            self._storage.set_trial_user_attr(trial._trial_id, VIEW, view.as_recorded())
            trials = self.trials()
        proposal = proposer.replay(number, trials)
        if not self._is_mine(number):  # this process was suspended during the proposal
            return False
        self._record(trials[number], proposal, missing)
        return True

    def _record(self, trial: FrozenTrial, proposal: Proposal, missing: Mapping[str, BaseDistribution]) -> None:
        trial_id, before = trial._trial_id, View.recorded(trial.user_attrs[VIEW]).sampler
        for name, value in proposal.study_attrs.items():
            if before.get(name) != value:
                self._storage.set_study_system_attr(self._id, name, value)
        for name, value in proposal.trial_attrs.items():
            self._storage.set_trial_system_attr(trial_id, name, value)
        for key, distribution in missing.items():
            value = distribution.to_internal_repr(proposal.params[key])
            self._storage.set_trial_param(trial_id, key, value, distribution)

    @_patient
    def tell(self, number: int, value: float | None = None, *, state: TrialState | None = None) -> bool:
        """Record the result of a trial; return False without an effect if another command has taken over the trial."""
        if not self._is_mine(number):
            return False
        with suppress(ended_trial_error()):  # recorded by this command before the storage stopped responding
            self._study.tell(number, value, state=state, skip_if_finished=True)
        return True

    @_patient
    def set_attribute(self, number: int, name: str, value: Any) -> None:
        """Set an attribute of a trial."""
        trial = self.trials()[number]
        if trial.user_attrs.get(name) != value:
            self._storage.set_trial_user_attr(trial._trial_id, name, value)

    @_patient
    def report(self, number: int, values: Mapping[int, float]) -> None:
        """Record intermediate values of a trial by their step; a step that has a value keeps it."""
        trial = self.trials()[number]
        for step, value in values.items():
            if step not in trial.intermediate_values:
                self._storage.set_trial_intermediate_value(trial._trial_id, step, value)

    def _is_mine(self, number: int) -> bool:
        """Return whether this command owns a trial."""
        return self.commands is None or self.commands.owners([self.trials()[number]])[number] == self.commands.me

    def _running(self, n_trials: int) -> list[FrozenTrial]:
        """Return the running trials, except trials beyond `n_trials` that have no values yet.

        Simultaneous commands can add these trials; they run only after the search is extended.
        """
        return [trial for trial in self.trials() if is_running(trial) and (trial.params or trial.number < n_trials)]
