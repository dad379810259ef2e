"""Place of a search's study: a file in the sweep directory, or a storage that several commands share."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foundry.config.schemas.sweeper import Search, Wait
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.names import STUDY
from foundry.run_dir.redact import recorded
from foundry.run_dir.strict_json import DamagedFileError
from foundry.run_dir.study_storage import (
    VARIABLE,
    StorageError,
    StudyLink,
    first_line,
    is_url,
    open_storage,
    outages,
    resolve_location,
)
from foundry.sweeps.search.commands import Commands, create_id
from foundry.sweeps.search.study import SearchStudy

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_KEY = "hydra.sweeper.storage"
_PRIVATE_NAME = "search"


class StudyPlace:
    """Place of the study of a search.

    Args:
        search: settings of the search.
        sweep_dir: the sweep directory.

    Raises:
        ConfigError: the storage is not set as it was when the sweep directory was created.
    """

    def __init__(self, search: Search, sweep_dir: Path) -> None:
        self._search, self._sweep_dir = search, sweep_dir
        self._name = _PRIVATE_NAME if search.storage is None else search.study_name
        try:
            self._link = StudyLink.load(sweep_dir)
        except DamagedFileError as error:
            message = f"is {sweep_dir}, but {error}; restore that file, or choose another directory"
            raise ConfigError(Violation("hydra.sweep.dir", message)) from None
        self._storage = None if search.storage is None else recorded(search.storage)
        self._check_link()
        self._location = None if search.storage is None else resolve_location(search.storage)

    @property
    def is_new(self) -> bool:
        """Whether no search has run in the sweep directory."""
        return self._link is None and not (self._sweep_dir / STUDY).is_file()

    def find(self) -> SearchStudy | None:
        """Return the study; None if it does not exist yet. Nothing is written to the sweep directory.

        Raises:
            ConfigError: the storage cannot be used.
        """
        path = Path(self._location or self._sweep_dir / STUDY)
        if self._location is not None and is_url(self._location):
            return self._reach(self._location)
        if not path.is_file():
            if not path.parent.is_dir() and self._location is not None:
                raise self._error(f"but the folder {path.parent} does not exist; create it")
            return None
        return self._reach(str(path))

    def check(self, study: SearchStudy, facts: Mapping[str, str]) -> None:
        """Check that an existing study is the same search.

        Raises:
            ConfigError: if the search space, the metric, the direction or the kind of waiting is another one.
        """
        wait, storage = self._search.wait, self._storage
        if storage is not None and study.facts is not None and not study.is_shared:
            message = f"but its study {study.name} belongs to one sweep directory; choose another file or study_name"
            raise self._error(message)
        key, remedy = "hydra.sweep.dir", "another folder"
        where = f"is {self._sweep_dir}, which"
        if storage is not None:
            key, remedy, where = "hydra.sweeper.study_name", "another name", f"is {study.name}, but the study there"
        old = facts if study.facts is None else study.facts
        changed = [name for name in {**old, **facts} if old.get(name) != facts.get(name)]
        changes = [f"{name} {old.get(name, 'not searched')}" for name in changed]
        if changes:
            message = f"{where} contains a search with {', '.join(changes)}; use these settings, or {remedy}"
            raise ConfigError(Violation(key, message))
        if wait is not None and study.wait is not None and wait is not study.wait:
            message = f"is {wait.value} but the search began with {study.wait.value}; omit it, or choose another folder"
            raise ConfigError(Violation("hydra.sweeper.wait", message))

    @contextmanager
    def open(self, facts: Mapping[str, str]) -> Iterator[SearchStudy]:
        """Open the study, or create it; if it is shared, take part in it until the `with` block ends.

        Raises:
            ConfigError: the storage cannot be used.
        """
        wait = self._search.wait or Wait.none
        direction = self._search.direction.value
        if self._location is None:
            storage = self._connect(str(self._sweep_dir / STUDY))
            yield SearchStudy.create(storage, self._name, direction, facts, wait)
            return
        link = self._link or StudyLink(storage=str(self._storage), study=self._name, command=create_id())
        link.save(self._sweep_dir)
        with self._outages():
            storage = self._connect(self._location)
            commands = Commands(storage, self._name, link.command)
            study = SearchStudy.create(storage, self._name, direction, facts, wait, commands)
            self.check(study, facts)  # another command may have created it since the first check
        with _variable(self._location), commands.beating():
            yield study

    def _check_link(self) -> None:
        """Check that the storage is the same as when the sweep directory was created."""
        storage, folder = self._storage, self._sweep_dir
        if self._link is None:
            if storage is not None and (folder / STUDY).is_file():
                message = f"but the search in {folder} has its own study in {STUDY}; omit it, or choose another folder"
                raise self._error(message)
        elif (self._link.storage, self._link.study) != (storage, self._name):
            message = f"but the search in {folder} began with {self._link.storage} and study_name={self._link.study}"
            raise self._error(f"{message}; use these settings, or choose another hydra.sweep.dir")

    def _reach(self, location: str) -> SearchStudy | None:
        with self._outages():
            return SearchStudy.find(self._connect(location), self._name)

    @contextmanager
    def _outages(self) -> Iterator[None]:
        """Refuse a storage that does not respond.

        Raises:
            ConfigError: the storage does not respond.
        """
        try:
            yield
        except outages() as error:
            raise self._error(f"but it does not respond: {first_line(error)}; start the same command again") from None

    def _connect(self, location: str) -> "BaseStorage":
        try:
            return open_storage(location)
        except StorageError as error:
            raise self._error(f"but {error}") from None

    def _error(self, message: str) -> ConfigError:
        return ConfigError(Violation(_KEY, f"is {'null' if self._storage is None else self._storage} {message}"))


@contextmanager
def _variable(location: str) -> Iterator[None]:
    """Set the environment variable that tells jobs the location."""
    former = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = location
    try:
        yield
    finally:
        if former is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = former
