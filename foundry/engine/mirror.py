"""Start of a run with `checkpoint.mirror`: identity, lease, restoring from the store, and the thread that copies."""

import json
import logging
import tempfile
import threading
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.mirror.main import MainMirror, MirrorState
from foundry.checkpoint.mirror.rank import RankMirror
from foundry.checkpoint.mirror.thread import Mirror, MirroredRun
from foundry.checkpoint.resume_point import ResumePoint, check_config
from foundry.config.build import field_of
from foundry.config.record.frozen import strict
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.engine.agreement import on_all_ranks
from foundry.engine.mirror_files import KEY, Inventories, complete_steps, explain, restore, take_inventories
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, list_checkpoints, parse_step
from foundry.run_dir.files import write_atomically
from foundry.run_dir.mirror.fetching import fetch_file
from foundry.run_dir.mirror.lease import LEASE, Lease, LeaseHeldError
from foundry.run_dir.mirror.snapshot import (
    IDENTITY,
    LATEST,
    DamagedMirrorError,
    LaterFormatError,
    read_published,
    read_snapshot,
)
from foundry.run_dir.mirror.store import MissingObjectError, Store, StoreError, join
from foundry.run_dir.names import MIRROR
from foundry.run_dir.status import now
from foundry.run_dir.sweep_file import find_job

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Opened:
    """Content of a store as rank 0 has found it, for all ranks.

    Attributes:
        state: content of the store.
        is_behind: whether the newest checkpoint of the store, or a file of it, is not in the run directory.
        lacks_files: whether the store also has small files that the run directory of rank 0 lacks, as for a newer
            checkpoint, or after a restoring that was interrupted.
    """

    state: MirrorState
    is_behind: bool = False
    lacks_files: bool = False
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
    explain_error = partial(explain, settings.mirror)
    url = on_all_ranks(lambda: _url_of(str(settings.mirror), run_dir) if world.is_main else "", world, explain_error)[0]
    inventories = take_inventories(run_dir, world, url)
    lease: Lease | None = None

    def open_on_main() -> _Opened | None:
        nonlocal lease
        if not world.is_main:
            return None
        lease = Lease(store)
        stack.callback(_release, lease, settings.mirror_seconds)
        return _open(store, lease, config, config_hash, run_dir, inventories)

    store = _new_store(url)
    explain_error = partial(explain, url)
    opened = on_all_ranks(open_on_main, world, explain_error)[0]
    assert opened is not None

    def record(is_main_complete: bool) -> None:
        if world.leads_disk:  # only the directory of rank 0 has small files
            _record(run_dir, opened.state.run, store, is_complete=world.is_main and is_main_complete)

    on_all_ranks(partial(record, not opened.lacks_files), world, explain_error)
    if opened.is_behind:
        restore(store, opened.state, run_dir, world, inventories, with_small_files=opened.lacks_files)
        on_all_ranks(partial(record, True), world, explain_error)
    run = MirroredRun(store=store, run_dir=run_dir, world_size=world.world_size, seconds=settings.mirror_seconds)
    if lease is None:
        mirror: Mirror = RankMirror(run, world.rank, opened.state.damaged)
    else:
        mirror = MainMirror(
            run,
            opened.state,
            lease,
            identity=opened.identity,
            keep_last=settings.keep_last,
            keep_every_steps=settings.keep_every,
            excluded=_caches(config),
        )
    stack.callback(mirror.close)
    return mirror


def leave_out_incomplete(mirror: Mirror, world: World) -> None:
    """Exclude the checkpoints on disk that cannot be copied, because a rank lacks its files; all ranks call this."""
    gathered = gather(mirror.copyable(), world)
    if isinstance(mirror, MainMirror):
        steps = {parse_step(folder) for folder in list_checkpoints(mirror.run_dir)}
        checksums = {step: {copyable.get(step) for copyable in gathered} for step in steps}
        mirror.leave_out([step for step, found in checksums.items() if len(found) > 1])


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
        raise ConfigError(Violation(KEY, f"is {as_text(url)}, which cannot be used: {error}")) from None


def _url_of(url: str, run_dir: Path) -> str:
    """Return the URL of a run: for a job of a sweep, the folder of the job below the URL of the sweep."""
    job = find_job(run_dir)
    return url if job is None else join(url, job)


def _caches(config: Config) -> list[Path]:
    """Return the folder of the data's cache, which may lie in the run directory."""
    cache_dir = field_of(config.data, "cache_dir")
    return [] if cache_dir is None else [Path(cache_dir).expanduser().resolve()]


def _open(
    store: Store, lease: Lease, config: Config, config_hash: str, run_dir: Path, inventories: Inventories
) -> _Opened:
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
    found, own = _read_identity(store), inventories[0]
    is_empty = is_new or found is None
    run = (own.run or uuid.uuid4().hex) if is_empty or found is None else str(found["run"])
    _check_same_run(run, store, run_dir, inventories, is_empty=is_empty)
    if is_empty or found is None:
        identity = {"run": run, "config_hash": config_hash, "created": now()}
        return _Opened(state=MirrorState(run=run), identity={IDENTITY: json.dumps(identity).encode()})
    state = _read_state(store, run)
    newest = max((*state.published, *state.damaged), default=None)
    lacks_files = newest is not None and (newest > max(own.checkpoints, default=-1) or own.lacks_files)
    is_behind = lacks_files or (newest is not None and newest > max(complete_steps(inventories), default=-1))
    if is_behind:
        _check_settings(store, state, config)
    elif newest is None and (own.run is None or own.lacks_files):
        if found.get("config_hash") != config_hash:
            message = f"is {store.url}, which holds a run with other settings but no checkpoint; choose another URL"
            raise _refusal(store, message)
        is_behind = lacks_files = state.latest is not None
    if is_behind and config.checkpoint.resume == "never":
        raise ConfigError(Violation("checkpoint.resume", f"is never but {store.url} has a run; choose another URL"))
    return _Opened(state=state, is_behind=is_behind, lacks_files=lacks_files)


def _check_same_run(run: str, store: Store, run_dir: Path, inventories: Inventories, *, is_empty: bool) -> None:
    """Check that no disk has another run than the store or, if the store is empty, than the disk of rank 0.

    Raises:
        ConfigError: a disk has another run.
    """
    for leader, other in inventories.items():
        is_unrecorded = other.run is None and (not other.has_checkpoints or (is_empty and leader == 0))
        if other.run == run or is_unrecorded:
            continue
        if is_empty:
            message = f"is {run_dir}, which contains another run on the disk of rank {leader}"
            raise ConfigError(Violation("hydra.run.dir", f"{message}; remove it there, or choose another folder"))
        place = f"{run_dir} on the disk of rank {leader}" if len(inventories) > 1 else str(run_dir)
        raise _refusal(store, f"is {store.url}, which holds another run than {place}; choose another URL")


def _record(run_dir: Path, run: str, store: Store, *, is_complete: bool) -> None:
    """Write the identity of the run into its directory, so that a later start knows that both are the same run.

    Args:
        run_dir: the run directory.
        run: identity of the run.
        store: the store.
        is_complete: whether the directory lacks no small files of the store; if it does, a start whose rank 0 uses the
            directory restores them.
    """
    content = {"run": run, "url": store.url, "is_complete": is_complete}
    write_atomically(run_dir / MIRROR, json.dumps(content) + "\n", durable=True)


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
            raise ConfigError([*error.violations, Violation(KEY, message)]) from None
        return


def _refusal(store: Store, message: str) -> ConfigError:
    return ConfigError(Violation(KEY, message))
