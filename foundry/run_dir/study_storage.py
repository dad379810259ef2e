"""Storage of a search's study: a journal file, or a database that several commands and hosts share."""

import json
import logging
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import STUDY_LINK
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import read_object

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

VARIABLE = "FOUNDRY_STUDY_STORAGE"
"""Environment variable with the location of a shared study, which a search sets for its jobs.

A location is not in a file of the run directory: it may contain a password, and a run directory from another user must
not direct a job to a file or server.
"""

_ATTEMPTS = 3
"""Attempts to open a database: it refuses some of several commands that create its tables at the same time."""
_RETRY_SECONDS = 0.3
_CONNECT_SECONDS = 10
_LOST_CONNECTION = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
"""Options of libpq that end a request after about a minute if the host of the database no longer responds."""
_LOCKED_SECONDS = 60
"""Wait for other writers of an SQLite file."""


class StorageError(Exception):
    """A study cannot be opened; the message is one line without secrets."""


@dataclass(frozen=True, kw_only=True)
class StudyLink:
    """Link from a sweep directory to a shared study.

    Attributes:
        storage: `hydra.sweeper.storage`; a URL with a password as its environment variable.
        study: name of the study.
        command: id of the commands that run in the sweep directory, one at a time.
    """

    storage: str
    study: str
    command: str

    def save(self, sweep_dir: Path) -> None:
        """Write the link to a sweep directory."""
        write_atomically(sweep_dir / STUDY_LINK, json.dumps(asdict(self), indent=2) + "\n", durable=True)

    @classmethod
    def load(cls, sweep_dir: Path) -> "StudyLink | None":
        """Return the link of a sweep directory; None if its search does not share a study.

        Raises:
            DamagedFileError: the file was not written by a search.
        """
        try:
            content = read_object(sweep_dir / STUDY_LINK, required=dict.fromkeys(("storage", "study", "command"), str))
        except FileNotFoundError:
            return None
        return cls(**{field.name: content[field.name] for field in fields(cls)})


def is_url(location: str) -> bool:
    """Return whether a location is a URL of a database; otherwise it is the path of a journal file."""
    return "://" in location


def resolve_location(storage: str) -> str:
    """Return the location in `hydra.sweeper.storage`, independent of the current folder."""
    if not is_url(storage):
        return str(Path(storage).absolute())
    scheme, _, path = storage.partition(":///")
    if scheme.startswith("sqlite") and path and not path.startswith("/"):
        return f"{scheme}:///{Path(path).absolute()}"
    return storage


def open_storage(location: str | Path) -> "BaseStorage":
    """Open Optuna's storage of a study.

    Args:
        location: path of a journal file, which processes on several machines may extend, or URL of a database.

    Raises:
        StorageError: the file or database cannot be opened, or a package for it is not installed.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not is_url(str(location)):
        try:
            return JournalStorage(JournalFileBackend(str(location)))
        except OSError as error:
            raise StorageError(f"the file cannot be opened: {first_line(error)}") from None
    return _open_database(str(location))


def outages() -> tuple[type[Exception], ...]:
    """Return the exceptions of a storage that does not respond."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    return (OSError, StorageInternalError, DBAPIError)


def ended_trial_error() -> type[Exception]:
    """Return the exception of an update of a trial that has ended; Optuna 4.0 has only a general one."""
    from optuna import exceptions

    return getattr(exceptions, "UpdateFinishedTrialError", RuntimeError)


def _open_database(url: str) -> "BaseStorage":
    import optuna
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs the dialect of each database
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            # pool_pre_ping: connections that an outage has closed are opened again.
            storage = RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": _connect_arguments(url)})
            return optuna.storages.get_storage(storage)
        except (ArgumentError, NoSuchModuleError) as error:
            raise StorageError(f"the URL is not valid for SQLAlchemy: {first_line(error)}") from None
        except ImportError as error:
            name = getattr(error.__cause__, "name", None) or one_line(str(error))
            requirement = "'psycopg[binary]'" if name == "psycopg" else name
            message = f"the URL needs the package {name}, which is not installed: install {requirement} with pip"
            raise StorageError(message) from None
        except (SQLAlchemyError, RuntimeError, OSError) as error:
            if attempt == _ATTEMPTS:
                raise StorageError(
                    f"the database cannot be used: {first_line(error)}; start it, or correct the URL"
                ) from None
            time.sleep(_RETRY_SECONDS)
    raise AssertionError


def _connect_arguments(url: str) -> dict[str, Any]:
    """Return the arguments of the database driver that limit its waits."""
    if url.startswith("sqlite"):
        return {"timeout": _LOCKED_SECONDS}
    is_libpq = url.startswith(("postgresql:", "postgresql+psycopg:", "postgresql+psycopg2:"))
    return {"connect_timeout": _CONNECT_SECONDS, **(_LOST_CONNECTION if is_libpq else {})}


def first_line(error: BaseException) -> str:
    """Return the first line of the error of the database driver or the operating system."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(next(iter(str(error).splitlines()), type(error).__name__))
