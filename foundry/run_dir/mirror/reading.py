"""Local copies of runs in a store, for commands that read a run; each object is copied once."""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from foundry.run_dir.lock import lock
from foundry.run_dir.mirror.fetching import fetch_checkpoint, fetch_small_files, restore_links
from foundry.run_dir.mirror.snapshot import (
    IDENTITY,
    LATEST,
    DamagedMirrorError,
    Snapshot,
    newest_files,
    read_published,
    read_snapshot,
)
from foundry.run_dir.mirror.store import MissingObjectError, Store, join

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
        for attempt in range(_MOST_TRIES):
            try:
                _fetch(store, which, folder)
                break
            except DamagedMirrorError as error:  # perhaps deleted meanwhile by the run, which has newer objects
                if attempt == _MOST_TRIES - 1:
                    raise NoRunError(f"is damaged: {error}") from None
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
    jobs = [name for name in store.names("") if store.size(f"{name}/{IDENTITY}") is not None]
    if not jobs:
        raise NoRunError("has no run")
    with _cache_of(store.url) as folder:
        for name in jobs:
            (folder / name).mkdir(exist_ok=True)
            job = Store(join(store.url, name))
            _fetch(job, None, folder / name)
    return folder


def _fetch(store: Store, which: str | None, folder: Path) -> None:
    run = _identity(store)
    published, damaged = ({}, {}) if which is None else read_published(store, run)
    for reason in damaged.values():
        log.warning("a checkpoint in %s is damaged and not used: %s", store.url, reason)
    try:
        latest: Snapshot | None = read_snapshot(store, LATEST, run)
    except MissingObjectError:
        latest = None
    snapshot = None if which is None else _choose(published, which)
    fetch_small_files(store, newest_files(latest, snapshot), folder)
    if snapshot is not None:
        fetch_checkpoint(store, snapshot, folder)
        newest = max(published)
        best = published[newest].best
        restore_links(folder, newest, best)


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
