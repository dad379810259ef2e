"""Commands that share a study: their heartbeats, and the owner of each trial.

They are in a second study of the same storage. Its attributes are the heartbeats. Its trials are claims: a command
takes over a trial whose owner is gone. The storage numbers trials atomically, so all commands see the claims in the
same order, and only the first claim against an owner has an effect.
"""

import logging
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from foundry.launch.ledger import say
from foundry.run_dir.study_storage import outages

TAKEOVER_SECONDS = 60.0
"""Time without a heartbeat after which other commands take over the trials of a command."""

COMMAND = "command"
"""Attribute of a trial: the command that created it. Of a claim: the command that takes over."""

_TRIAL, _FORMER = "trial", "from"
_BEATS = 6
"""Heartbeats in `TAKEOVER_SECONDS`."""

_log = logging.getLogger(__name__)


def create_id() -> str:
    """Return an id for a command; it is kept in the sweep directory, so that a restarted command is the same one."""
    return uuid.uuid4().hex


class Commands:
    """Commands that share a study.

    Args:
        storage: storage of the study.
        study_name: name of the study.
        me: id of this command.
        takeover_seconds: see `TAKEOVER_SECONDS`.
    """

    def __init__(
        self, storage: BaseStorage, study_name: str, me: str, *, takeover_seconds: float = TAKEOVER_SECONDS
    ) -> None:
        name = f"{study_name} commands"
        optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
        self.me = me
        self.beat_seconds = takeover_seconds / _BEATS
        self._storage, self._id = storage, storage.get_study_id_from_name(name)
        self._takeover_seconds = takeover_seconds
        self._seen = dict[str, tuple[object, float]]()
        """Last heartbeat of each command, and the time of its first observation."""
        self._last_outage = -float("inf")
        self._process = uuid.uuid4().hex
        """Part of the heartbeats of this process."""
        self._has_beaten, self._has_warned = False, False

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats until the `with` block ends."""
        try:
            self._beat()
        except outages():
            self.note_outage()
        end = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(end,), name="heartbeat of the search", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(self.beat_seconds)  # it may wait for a storage that does not respond

    def owners(self, trials: Iterable[FrozenTrial]) -> dict[int, str]:
        """Return the owner of each trial by its number."""
        owners = {trial.number: str(trial.user_attrs.get(COMMAND, "")) for trial in trials}
        for claim in self._storage.get_all_trials(self._id, deepcopy=False):
            number = claim.user_attrs[_TRIAL]
            if owners.get(number) == claim.user_attrs[_FORMER]:
                owners[number] = claim.user_attrs[COMMAND]
        return owners

    def claim(self, trial: FrozenTrial, former: str) -> bool:
        """Take over a trial from its owner, which is gone; return whether this command owns it now.

        Args:
            trial: the trial.
            former: the owner that is gone. The claim has no effect if another command has claimed the trial since.
        """
        attributes = {_TRIAL: trial.number, _FORMER: former, COMMAND: self.me}
        claim = optuna.trial.create_trial(state=TrialState.COMPLETE, value=0.0, user_attrs=attributes)
        self._storage.create_new_trial(self._id, claim)
        return self.owners([trial])[trial.number] == self.me

    def gone(self, owners: Iterable[str]) -> set[str]:
        """Return the commands among `owners` whose heartbeat has not changed for `takeover_seconds`.

        The time of other machines is not used. While the storage does not respond, no time passes.
        """
        begin = time.monotonic()  # this process may be suspended during the request
        heartbeats = self._storage.get_study_user_attrs(self._id)
        end, gone = time.monotonic(), set[str]()
        for owner in set(owners) - {self.me}:
            heartbeat = heartbeats.get(owner)
            if owner not in self._seen or self._seen[owner][0] != heartbeat:
                self._seen[owner] = heartbeat, end
            elif begin - max(self._seen[owner][1], self._last_outage) >= self._takeover_seconds:
                gone.add(owner)
        return gone

    def note_outage(self) -> None:
        """Restart the measurement of time for `gone`, because no command could send a heartbeat."""
        self._last_outage = time.monotonic()

    def _beat(self) -> None:
        begin = time.monotonic()
        self._storage.set_study_user_attr(self._id, self.me, f"{datetime.now(UTC).isoformat()} {self._process}")
        self._has_beaten = True
        if time.monotonic() - begin > self.beat_seconds:  # heartbeats of other commands were late, too
            self.note_outage()

    def _check_alone(self) -> None:
        """Warn once if another process has sent a heartbeat with the id of this command since the last one."""
        heartbeat = str(self._storage.get_study_user_attrs(self._id).get(self.me))
        if self._has_beaten and not self._has_warned and not heartbeat.endswith(self._process):
            self._has_warned = True
            say(
                "another process continues the same sweep directory, or a copy of it, so both run the same trials; "
                "end one of them, and start it with another hydra.sweep.dir",
                sys.stderr,
            )

    def _beat_until(self, end: threading.Event) -> None:
        while not end.wait(self.beat_seconds):
            try:
                self._check_alone()
                self._beat()
            except outages():
                self.note_outage()
            except Exception as error:  # without this thread, other commands would take over the trials
                _log.warning("the heartbeat of the search failed: %s: %s", type(error).__name__, error)
                self.note_outage()
