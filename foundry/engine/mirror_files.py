"""Checkpoints on the disks of a run at its start, and restoring of the files that they lack from a store."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from foundry.checkpoint.folder import CheckpointError, DamagedError, list_put_aside, manifest_checksum, read_manifest
from foundry.checkpoint.mirror.main import MirrorState
from foundry.checkpoint.mirror.thread import writer_of
from foundry.checkpoint.verification import together
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.engine.agreement import on_all_ranks
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, list_checkpoints, parse_step
from foundry.run_dir.files import inside
from foundry.run_dir.log import NOTICE
from foundry.run_dir.mirror.fetching import (
    begin_checkpoint,
    end_checkpoint,
    fetch_file,
    fetch_small_files,
    partial_folder,
    restore_links,
)
from foundry.run_dir.mirror.snapshot import DamagedMirrorError, Snapshot, newest_files
from foundry.run_dir.mirror.store import Store, StoreError
from foundry.run_dir.names import COLUMNS, MIRROR
from foundry.run_dir.strict_json import DamagedFileError, read_optional

KEY = "checkpoint.mirror"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on one disk, by the names and sizes of its files; their content is not read.

    Attributes:
        manifest: checksum of the manifest.
        present: files that exist with the size in the manifest.
        missing: other files of the manifest.
    """

    manifest: str
    present: set[str]
    missing: set[str]


@dataclass(frozen=True)
class Inventory:
    """Run directory on one disk.

    Attributes:
        run: recorded identity of the run; None if none is recorded.
        lacks_files: whether the directory is recorded to lack small files of the store.
        has_checkpoints: whether it has checkpoints, including damaged ones that were renamed.
        checkpoints: checkpoints with a readable manifest, by step.
    """

    run: str | None = None
    lacks_files: bool = False
    has_checkpoints: bool = False
    checkpoints: dict[int, LocalCheckpoint] = field(default_factory=dict)


Inventories = Mapping[int, Inventory]
"""Run directory on each disk, by the leader of the disk: rank 0 if all ranks share one."""


def take_inventories(run_dir: Path, world: World, url: str) -> Inventories:
    """Return the run directory on each disk; all ranks call this together.

    Raises:
        ConfigError: a directory cannot be read.
    """
    work = partial(_take_inventory, run_dir) if world.leads_disk else Inventory
    gathered = on_all_ranks(work, world, partial(explain, url))
    return {leader: gathered[leader] for leader in _leaders(world)}


def _take_inventory(run_dir: Path) -> Inventory:
    checkpoints, folders = dict[int, LocalCheckpoint](), list_checkpoints(run_dir)
    try:
        record = read_optional(run_dir / MIRROR)
    except DamagedFileError as error:
        raise ConfigError(Violation("hydra.run.dir", f"is {run_dir}, but {error}; choose another folder")) from None
    for folder in folders:
        try:
            files = read_manifest(folder).files
            present = {name for name, facts in files.items() if _has_size(folder / name, facts.bytes)}
            checkpoints[parse_step(folder)] = LocalCheckpoint(
                manifest_checksum(folder), present, set(files).difference(present)
            )
        except DamagedError:  # reported when the checkpoint to resume from is searched
            continue
        except (CheckpointError, OSError) as error:
            if not checkpoints:  # it is newer than all readable ones, so that restoring would replace it
                message = f"is {run_dir}, but its {folder.name} cannot be read: {error}; correct it, or choose another"
                raise ConfigError(Violation("hydra.run.dir", message)) from None
    run = record.get("run")
    has_checkpoints = bool(folders or list_put_aside(run_dir))
    return Inventory(
        run if isinstance(run, str) else None, record.get("is_complete") is False, has_checkpoints, checkpoints
    )


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.is_file() and file.stat().st_size == size
    except OSError:
        return False


def _leaders(world: World) -> Sequence[int]:
    return [0] if world.disks is None else world.disks.of_leaders


def _peers(world: World, rank: int) -> Sequence[int]:
    """Return the ranks on the disk of a rank."""
    return range(world.world_size) if world.disks is None else world.disks.peers(rank)


def complete_steps(inventories: Inventories) -> list[int]:
    """Return the steps of the checkpoints on the disk of rank 0 whose files are each on at least one disk."""
    steps = list[int]()
    for step, own in inventories[0].checkpoints.items():
        if not own.missing.difference(_present(inventories, step, own.manifest)):
            steps.append(step)
    return steps


def _present(inventories: Inventories, step: int, manifest: str) -> set[str]:
    """Return the files of a checkpoint that are on any disk."""
    folders = (inventory.checkpoints.get(step) for inventory in inventories.values())
    return {name for folder in folders if folder is not None and folder.manifest == manifest for name in folder.present}


def explain(url: str, error: OSError) -> Violation:
    """Return the message for an error of the store, or of the run directory that is restored from it."""
    if isinstance(error, StoreError):
        message = f"is {as_text(url)}, which cannot be used: {error}; check the URL, the credentials and the network"
        return Violation(KEY, message)
    return Violation("hydra.run.dir", f"cannot be restored from {as_text(url)}: {error}; correct that")


def restore(
    store: Store, state: MirrorState, run_dir: Path, world: World, inventories: Inventories, *, with_small_files: bool
) -> None:
    """Copy the newest intact checkpoint, the best one and the small files into the run directory.

    If the nodes have local disks, a file that is missing on all of them is copied to one of them.

    Args:
        store: the store.
        state: content of the store; damaged checkpoints are moved to `damaged`.
        run_dir: the run directory.
        world: all its ranks call this function together.
        inventories: run directory on each disk.
        with_small_files: whether the directory of rank 0 lacks small files of the store.

    Raises:
        ConfigError: the store cannot be read, or has checkpoints but none is intact.
    """
    restored: int | None = None
    for step in sorted(state.published, reverse=True):
        if _fetch_together(store, state, step, run_dir, world, inventories):
            restored = step
            break
    if restored is None and (state.published or state.damaged):
        message = f"is {store.url}, but all of its checkpoints are damaged; choose another URL"
        raise ConfigError(Violation(KEY, message))
    snapshot = None if restored is None else state.published[restored]
    best = None if snapshot is None else snapshot.best
    if best is not None and best != restored and best in state.published:
        _fetch_together(store, state, best, run_dir, world, inventories)
    latest = state.latest
    if latest is not None and latest.step != restored:  # it may record the end of the run at another step
        latest = latest.without_end()
    choices = newest_files(latest, snapshot)

    def fetch_on_leaders() -> Mapping[str, str]:
        damaged: Mapping[str, str] = {}
        if world.is_main and with_small_files:
            damaged = fetch_small_files(store, choices, run_dir, is_launch=True)
        elif world.leads_disk and not world.is_main:  # these values are read on every rank
            columns = [{COLUMNS: files[COLUMNS]} for files in choices if COLUMNS in files]
            damaged = fetch_small_files(store, columns, run_dir, is_launch=True)
        if world.leads_disk and restored is not None:
            restore_links(run_dir, restored, best)
        return damaged

    for name, reason in on_all_ranks(fetch_on_leaders, world, partial(explain, store.url))[0].items():
        if world.is_main:
            log.warning("%r is not restored from %s: %s", name, store.url, reason)
    if world.is_main:
        log.log(NOTICE, "restored step %s of the run from %s", restored or 0, store.url)
    for step in state.damaged:
        state.published.pop(step, None)


def _fetch_together(
    store: Store, state: MirrorState, step: int, run_dir: Path, world: World, inventories: Inventories
) -> bool:
    """Copy the files of a checkpoint that no disk has, divided among the ranks; return whether they are intact.

    All ranks communicate after each file, so that no rank waits longer than the timeout of collectives.

    Raises:
        ConfigError: the store cannot be read.
    """
    if step in complete_steps(inventories):
        return True
    snapshot, explain_error = state.published[step], partial(explain, store.url)
    names = _names_to_fetch(snapshot, step, world, inventories)
    own, folder = names[world.rank], partial_folder(run_dir, step)
    receives = world.leads_disk and any(names[rank] for rank in _peers(world, world.rank))

    def prepare() -> None:
        if receives:
            begin_checkpoint(run_dir, step)

    def fetch(number: int) -> str | None:
        if number >= len(own):
            return None
        try:
            fetch_file(store, snapshot.checkpoint[own[number]], inside(folder, own[number]))
        except DamagedMirrorError as error:
            return str(error)
        return None

    on_all_ranks(prepare, world, explain_error)
    for number in range(max(map(len, names))):
        reasons = [reason for reason in on_all_ranks(partial(fetch, number), world, explain_error) if reason]
        if reasons:
            state.damaged.add(step)
            if receives:
                shutil.rmtree(folder, ignore_errors=True)
            if world.is_main:
                log.warning("step %d in %s is damaged and not used: %s", step, store.url, "; ".join(reasons))
            return False
    together(lambda: end_checkpoint(run_dir, step) if receives else None, world)
    return True


def _names_to_fetch(snapshot: Snapshot, step: int, world: World, inventories: Inventories) -> list[list[str]]:
    """Return for each rank the files of a checkpoint that it fetches, the same on every rank.

    The manifest is fetched for each disk that lacks it, and each other file that no disk has for the disk of the rank
    that wrote it. The ranks of a disk take turns.
    """
    part = snapshot.checkpoint.get(MANIFEST)
    manifest = "" if part is None else part.checksum
    lacking = sorted(set(snapshot.checkpoint).difference(_present(inventories, step, manifest), {MANIFEST}))
    names: list[list[str]] = [[] for _ in range(world.world_size)]
    for leader in _leaders(world):
        local = inventories[leader].checkpoints.get(step)
        of_disk = [] if part is None or (local is not None and local.manifest == manifest) else [MANIFEST]
        peers = _peers(world, leader)
        of_disk += [name for name in lacking if writer_of(name, world.world_size) in peers]
        for number, name in enumerate(of_disk):
            names[peers[number % len(peers)]].append(name)
    return names
