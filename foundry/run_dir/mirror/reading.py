"""Local copies of runs in a store, for commands that read a run; each object is copied once."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from foundry.run_dir.files import make_folder, write_atomically
from foundry.run_dir.lock import LOCK, lock
from foundry.run_dir.mirror.fetching import fetch_checkpoint, fetch_small_files, restore_links
from foundry.run_dir.mirror.snapshot import (
    IDENTITY,
    LATEST,
    DamagedMirrorError,
    LaterFormatError,
    Snapshot,
    newest_files,
    read_published,
    read_snapshot,
)
from foundry.run_dir.mirror.store import MissingObjectError, Store, join
from foundry.run_dir.names import MIRROR
from foundry.run_dir.strict_json import DamagedFileError, read_optional

_MOST_TRIES = 5
log = logging.getLogger(__name__)


class NoRunError(ValueError):
    """A URL has no run, or the run does not have the checkpoint; the message completes `is URL, which ...`."""


def fetch_run(url: str, which: str | None) -> Path:
    """Return a local folder with the small files of a run in a store, and one of its checkpoints.

    Args:
        url: URL of the run.
        which: "last", "best", or a step number; None for the small files alone.

    Raises:
        NoRunError: the run does not exist, or its checkpoint does not exist or is damaged.
        StoreError: the store cannot be read.
    """
    store = Store(url)
    with _cache_of(store.url) as folder:
        _fetch(store, which, folder)
    return folder


def fetch_runs(url: str) -> Path:
    """Return a local folder with the small files of each run directly below a URL, or of the run at the URL.

    Raises:
        NoRunError: there is no run.
        StoreError: the store cannot be read.
    """
    store = Store(url)
    if store.size(IDENTITY) is not None:
        return fetch_run(url, None)
    # A store may contain any name, such as `..`.
    names = [name for name in store.names("") if not name.startswith(".")]
    jobs = [name for name in names if store.size(f"{name}/{IDENTITY}") is not None]
    if not jobs:
        raise NoRunError("has no run")
    with _cache_of(store.url) as folder:
        _empty(folder, but=jobs)
        for name in jobs:
            job = Store(join(store.url, name))
            try:
                _fetch(job, None, make_folder(folder / name))
            except NoRunError as error:
                log.warning("%s %s", job.url, error)
    return folder


def _fetch(store: Store, which: str | None, folder: Path) -> None:
    """Copy the small files of a run, and one of its checkpoints, into a folder.

    Raises:
        NoRunError: as in `fetch_run`.
        StoreError: the store cannot be read.
    """
    for attempt in range(1, _MOST_TRIES + 1):
        try:
            _try_to_fetch(store, which, folder, is_last=attempt == _MOST_TRIES)
            return
        except DamagedMirrorError as error:  # perhaps deleted meanwhile by the run, which has newer objects
            reason = str(error)
        except LaterFormatError as error:
            raise NoRunError(f"cannot be read: {error}") from None
    raise NoRunError(f"is damaged: {reason}")


def _try_to_fetch(store: Store, which: str | None, folder: Path, *, is_last: bool) -> None:
    run = _identity(store)
    _claim(folder, run)
    published, damaged = ({}, {}) if which is None else read_published(store, run)
    for reason in damaged.values():
        log.warning("a checkpoint in %s is damaged and not used: %s", store.url, reason)
    try:
        latest: Snapshot | None = read_snapshot(store, LATEST, run)
    except MissingObjectError:
        latest = None
    except DamagedMirrorError as error:
        if which is None or not is_last:
            raise
        log.warning("%s is damaged and not used: %s", store.url, error)
        latest = None
    snapshot = None if which is None else _choose(published, which)
    missing = fetch_small_files(store, newest_files(latest, snapshot), folder)
    if missing and not is_last:
        raise DamagedMirrorError(next(iter(missing.values())))
    for name, reason in missing.items():
        log.warning("%r is not read from %s: %s", name, store.url, reason)
    if snapshot is not None:
        fetch_checkpoint(store, snapshot, folder)
        newest = max(published)
        restore_links(folder, newest, published[newest].best)


def _claim(folder: Path, run: str) -> None:
    """Record the run in its local folder, after the files of another run that was at the URL before are deleted."""
    try:
        is_same = read_optional(folder / MIRROR).get("run") == run
    except DamagedFileError:
        is_same = False
    if not is_same:
        _empty(folder)
        write_atomically(folder / MIRROR, json.dumps({"run": run}) + "\n")


def _empty(folder: Path, but: Collection[str] = ()) -> None:
    """Delete the content of a folder of the cache, except its lock and some names."""
    for path in folder.iterdir():
        if path.name == LOCK or path.name in but:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _choose(published: dict[int, Snapshot], which: str) -> Snapshot:
    """Return the checkpoint that `which` selects.

    Raises:
        NoRunError: it does not exist.
    """
    step: int | None = max(published, default=None)
    if which == "best":
        step = None if step is None else published[step].best
    elif which != "last":
        step = int(which) if which.isdecimal() else None
    if step not in published:
        names = ", ".join(map(str, sorted(published))) or "none"
        raise NoRunError(f"has no checkpoint {which!r}; steps with a checkpoint: {names}")
    return published[step]


def _identity(store: Store) -> str:
    try:
        return str(store.read_json(IDENTITY)["run"])
    except MissingObjectError:
        raise NoRunError("has no run") from None
    except (ValueError, KeyError):
        raise NoRunError(f"has a damaged {IDENTITY}") from None


@contextmanager
def _cache_of(url: str) -> Iterator[Path]:
    """Yield the local folder of a URL, locked against other commands."""
    cache = Path(os.environ.get("FOUNDRY_CACHE", ".cache/foundry")).expanduser().resolve()
    folder = cache / "mirrors" / hashlib.sha256(url.encode()).hexdigest()[:32]
    with ExitStack() as stack:
        while not lock(folder, stack):
            time.sleep(0.2)
        yield folder
