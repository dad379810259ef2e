"""Start of a run with `checkpoint.mirror`: identity, lease, restoring from the store, and the thread that copies."""

import json
import logging
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from foundry.checkpoint.folder import CheckpointError, list_put_aside, read_manifest
from foundry.checkpoint.mirror.main import MainMirror, MirrorState
from foundry.checkpoint.mirror.rank import RankMirror
from foundry.checkpoint.mirror.thread import Mirror
from foundry.checkpoint.resume_point import ResumePoint, check_config
from foundry.checkpoint.verification import together
from foundry.config.build import field_of
from foundry.config.record.frozen import strict
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, list_checkpoints, parse_step
from foundry.run_dir.files import inside, write_atomically
from foundry.run_dir.log import NOTICE
from foundry.run_dir.mirror.fetching import (
    begin_checkpoint,
    end_checkpoint,
    fetch_file,
    fetch_small_files,
    partial_folder,
    restore_links,
)
from foundry.run_dir.mirror.lease import LEASE, Lease, LeaseHeldError
from foundry.run_dir.mirror.snapshot import (
    IDENTITY,
    LATEST,
    DamagedMirrorError,
    LaterFormatError,
    newest_files,
    read_published,
    read_snapshot,
)
from foundry.run_dir.mirror.store import MissingObjectError, Store, StoreError, join
from foundry.run_dir.names import MIRROR
from foundry.run_dir.status import now
from foundry.run_dir.strict_json import read_optional
from foundry.run_dir.sweep_file import find_job

_KEY = "checkpoint.mirror"
_T = TypeVar("_T")
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Opened:
    """Content of a store as rank 0 has found it, for all ranks.

    Attributes:
        state: content of the store.
        is_behind: whether the store has a newer checkpoint than the run directory, or files that it lacks, as after a
            restoring that was interrupted.
    """

    state: MirrorState
    is_behind: bool
    identity: dict[str, bytes] = field(default_factory=dict)


def open_mirror(config: Config, config_hash: str, run_dir: Path, world: World, stack: ExitStack) -> Mirror | None:
    """Check the mirror of a run, restore the run from it if it has a newer checkpoint, and return the thread to start.

    All ranks call this together, after rank 0 has locked the run directory.

    Args:
        config: configuration of the run.
        config_hash: its hash.
        run_dir: the run directory.
        world: this rank and its process group.
        stack: closes the mirror at the end of the run.

    Returns:
        The thread of this rank; None for a run without a mirror.

    Raises:
        ConfigError: the store cannot be used, contains another run, or is written by another process; or all of its
            checkpoints are damaged.
    """
    settings = config.checkpoint
    if settings.mirror is None:
        return None
    url = _url_of(settings.mirror, run_dir)
    lease: Lease | None = None

    def open_on_main() -> _Opened | None:
        nonlocal lease
        if not world.is_main:
            return None
        lease = Lease(store)
        stack.callback(_release, lease, settings.mirror_seconds)
        return _open(store, lease, config, config_hash, run_dir)

    store = _new_store(url)
    opened = _on_all_ranks(open_on_main, url, world)[0]
    assert opened is not None
    if opened.is_behind:
        _restore(store, opened.state, run_dir, world)
    if lease is None:
        mirror: Mirror = RankMirror(
            store,
            run_dir,
            rank=world.rank,
            world_size=world.world_size,
            seconds=settings.mirror_seconds,
            damaged=opened.state.damaged,
        )
    else:
        mirror = MainMirror(
            store,
            run_dir,
            opened.state,
            lease,
            world_size=world.world_size,
            seconds=settings.mirror_seconds,
            identity=opened.identity,
            keep_last=settings.keep_last,
            keep_every_steps=settings.keep_every,
            excluded=_caches(config),
        )
    stack.callback(mirror.close)
    return mirror


def _release(lease: Lease, seconds: float) -> None:
    """Give a lease back, but do not wait longer than a number of seconds for the store."""
    thread = threading.Thread(target=lease.release, name="mirror-release", daemon=True)
    thread.start()
    thread.join(seconds)
    lease.abandon()


def _new_store(url: str) -> Store:
    """Return the store at a URL, on every rank alike.

    Raises:
        ConfigError: the package of the file system refuses the URL.
    """
    try:
        return Store(url)
    except StoreError as error:
        raise ConfigError(Violation(_KEY, f"is {as_text(url)}, which cannot be used: {error}")) from None


def _url_of(url: str, run_dir: Path) -> str:
    """Return the URL of a run: for a job of a sweep, the folder of the job below the URL of the sweep."""
    job = find_job(run_dir)
    return url if job is None else join(url, job)


def _caches(config: Config) -> list[Path]:
    """Return the folder of the data's cache, which may lie in the run directory."""
    cache_dir = field_of(config.data, "cache_dir")
    return [] if cache_dir is None else [Path(cache_dir).expanduser().resolve()]


def _on_all_ranks(work: Callable[[], _T], url: str, world: World) -> Sequence[_T]:
    """Call a function on every rank and return all results; if it fails on any rank, all ranks raise its errors.

    Raises:
        ConfigError: the store cannot be used, or `work` has raised a ConfigError.
    """
    result: _T | None = None
    violations = list[tuple[str, str]]()
    try:
        result = work()
    except ConfigError as error:
        violations = [(violation.key, violation.message) for violation in error.violations]
    except StoreError as error:
        message = f"is {as_text(url)}, which cannot be used: {error}; check the URL, the credentials and the network"
        violations = [(_KEY, message)]
    except OSError as error:  # all ranks must learn of it
        violations = [("hydra.run.dir", f"cannot be restored from {as_text(url)}: {error}; correct that")]
    gathered = gather((result, violations), world)
    if errors := [Violation(*violation) for _, others in gathered for violation in others]:
        raise ConfigError(errors)
    return [result for result, _ in gathered]  # type: ignore[misc]


def _open(store: Store, lease: Lease, config: Config, config_hash: str, run_dir: Path) -> _Opened:
    """Take the lease of a store, and compare the run in it with the run directory.

    Raises:
        ConfigError: the store contains another run, or another process writes to it.
        StoreError: the store cannot be read or written.
    """
    is_new = _check_only_mirrors(store)
    try:
        lease.take()
    except LeaseHeldError as error:
        raise _refusal(store, f"is {store.url}, but {error}; wait for that run, or choose another URL") from None
    lease.keep()
    found, record = _read_identity(store), read_optional(run_dir / MIRROR)
    local = record.get("run")
    steps = _intact_names(run_dir)
    if is_new or found is None:
        run = local if isinstance(local, str) else uuid.uuid4().hex
        _record(run_dir, run, store)
        identity = {"run": run, "config_hash": config_hash, "created": now()}
        return _Opened(state=MirrorState(run=run), is_behind=False, identity={IDENTITY: json.dumps(identity).encode()})
    run = str(found["run"])
    is_same = local == run or (local is None and not steps and not list_put_aside(run_dir))
    if not is_same:
        raise _refusal(store, f"is {store.url}, which holds another run than {run_dir}; choose another URL")
    state = _read_state(store, run)
    newest = max((*state.published, *state.damaged), default=None)
    is_behind = newest is not None and (newest > max(steps, default=-1) or record.get("is_complete") is False)
    if is_behind:
        _check_settings(store, state, config)
    elif newest is None and (local is None or record.get("is_complete") is False):
        if found.get("config_hash") != config_hash:
            message = f"is {store.url}, which holds a run with other settings but no checkpoint; choose another URL"
            raise _refusal(store, message)
        is_behind = state.latest is not None
    if is_behind and config.checkpoint.resume == "never":
        raise ConfigError(Violation("checkpoint.resume", f"is never but {store.url} has a run; choose another URL"))
    _record(run_dir, run, store, is_complete=not is_behind)
    return _Opened(state=state, is_behind=is_behind)


def _record(run_dir: Path, run: str, store: Store, *, is_complete: bool = True) -> None:
    """Write the identity of the run into its directory, so that a later start knows that both are the same run.

    Args:
        run_dir: the run directory.
        run: identity of the run.
        store: the store.
        is_complete: whether the directory lacks no files of the store; if not, the next start restores them.
    """
    content = {"run": run, "url": store.url, "is_complete": is_complete}
    write_atomically(run_dir / MIRROR, json.dumps(content) + "\n", durable=True)


def _intact_names(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints in the run directory that have a manifest."""
    return [parse_step(folder) for folder in list_checkpoints(run_dir) if (folder / MANIFEST).is_file()]


def _check_only_mirrors(store: Store) -> bool:
    """Return whether a store is empty, apart from a lease.

    Raises:
        ConfigError: the store has files but no run.
    """
    names = {name for name in store.names("") if name != LEASE and not name.endswith(".partial")}
    if names and IDENTITY not in names:
        raise _refusal(
            store, f"is {store.url}, which has files that are not a run's, such as {min(names)}; choose another URL"
        )
    return not names


def _read_identity(store: Store) -> dict[str, Any] | None:
    """Return the content of run.json; None if it does not exist.

    Raises:
        ConfigError: the object is not one of foundry.
    """
    try:
        content = store.read_json(IDENTITY)
    except MissingObjectError:
        return None
    except ValueError:
        content = {}
    if not isinstance(content.get("run"), str):
        raise _refusal(store, f"is {store.url}, whose {IDENTITY} is damaged; choose another URL")
    return content


def _read_state(store: Store, run: str) -> MirrorState:
    try:
        return _read_snapshots(store, run)
    except LaterFormatError as error:
        raise _refusal(store, f"is {store.url}, where {error}, or choose another URL") from None


def _read_snapshots(store: Store, run: str) -> MirrorState:
    snapshots, damaged = read_published(store, run)
    for reason in damaged.values():
        log.warning("a checkpoint in %s is damaged and not used: %s", store.url, reason)
    try:
        latest = read_snapshot(store, LATEST, run)
    except MissingObjectError:
        latest = None
    except DamagedMirrorError as error:
        log.warning("%s is damaged and not used: %s", store.url, error)
        latest = None
    return MirrorState(run=run, published=snapshots, latest=latest, damaged=set(damaged))


def _check_settings(store: Store, state: MirrorState, config: Config) -> None:
    """Compare the settings of this run with the newest checkpoint in the store, before that checkpoint is copied.

    Raises:
        ConfigError: the run in the store has other settings that change its computation.
    """
    for step in sorted(state.published, reverse=True):
        part = state.published[step].checkpoint.get(MANIFEST)
        if part is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                fetch_file(store, part, Path(folder) / MANIFEST)
                manifest = read_manifest(Path(folder))
            except (DamagedMirrorError, CheckpointError):  # reported when the checkpoint is restored
                continue
        try:
            check_config(
                ResumePoint(Path(store.url), manifest), config, strict(config), config.checkpoint.on_changed_config
            )
        except ConfigError as error:
            message = f"is {store.url}, which holds a run with other settings; choose another URL for a new run"
            raise ConfigError([*error.violations, Violation(_KEY, message)]) from None
        return


def _restore(store: Store, state: MirrorState, run_dir: Path, world: World) -> None:
    """Copy the newest intact checkpoint, the best one and the small files into the run directory.

    Raises:
        ConfigError: the store cannot be read, or has checkpoints but none is intact.
    """
    restored: int | None = None
    for step in sorted(state.published, reverse=True):
        if _fetch_together(store, state, step, run_dir, world):
            restored = step
            break
    if restored is None and (state.published or state.damaged):
        raise _refusal(store, f"is {store.url}, but all of its checkpoints are damaged; choose another URL")
    snapshot = None if restored is None else state.published[restored]
    best = None if snapshot is None else snapshot.best
    if best is not None and best != restored and best in state.published:
        _fetch_together(store, state, best, run_dir, world)
    latest = state.latest
    if latest is not None and latest.step != restored:  # it may record the end of the run at another step
        latest = latest.without_end()
    choices = newest_files(latest, snapshot)

    def fetch_on_main() -> Mapping[str, str]:
        if not world.is_main:
            return {}
        damaged = fetch_small_files(store, choices, run_dir, is_launch=True)
        if restored is not None:
            restore_links(run_dir, restored, best)
        _record(run_dir, state.run, store)
        return damaged

    for name, reason in _on_all_ranks(fetch_on_main, store.url, world)[0].items():
        if world.is_main:
            log.warning("%r is not restored from %s: %s", name, store.url, reason)
    if world.is_main:
        log.log(NOTICE, "restored step %s of the run from %s", restored or 0, store.url)
    for step in state.damaged:
        state.published.pop(step, None)


def _fetch_together(store: Store, state: MirrorState, step: int, run_dir: Path, world: World) -> bool:
    """Copy a checkpoint, whose files are divided among the ranks; return whether it is intact.

    All ranks communicate after each file, so that no rank waits longer than the timeout of collectives.

    Raises:
        ConfigError: the store cannot be read.
    """
    snapshot = state.published[step]
    names, size = sorted(snapshot.checkpoint), world.world_size

    def prepare() -> bool:
        if not world.is_main:
            return False
        exists = step in _intact_names(run_dir)
        if not exists:
            begin_checkpoint(run_dir, step)
        return exists

    def fetch(start: int) -> str | None:
        if (number := start + world.rank) >= len(names):
            return None
        try:
            file = inside(partial_folder(run_dir, step), names[number])
            fetch_file(store, snapshot.checkpoint[names[number]], file)
        except DamagedMirrorError as error:
            return str(error)
        return None

    if _on_all_ranks(prepare, store.url, world)[0]:
        return True
    for start in range(0, len(names), size):
        reasons = [reason for reason in _on_all_ranks(partial(fetch, start), store.url, world) if reason is not None]
        if reasons:
            state.damaged.add(step)
            if world.is_main:
                log.warning("step %d in %s is damaged and not used: %s", step, store.url, "; ".join(reasons))
                shutil.rmtree(partial_folder(run_dir, step), ignore_errors=True)
            return False
    together(lambda: end_checkpoint(run_dir, step) if world.is_main else None, world)
    return True


def _refusal(store: Store, message: str) -> ConfigError:
    return ConfigError(Violation(_KEY, message))
