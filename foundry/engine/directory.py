"""Run directory at the start of a run: its lock, and the local disks of nodes that do not share it."""

import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from foundry.config.schemas.checkpoint import Checkpoint
from foundry.core.errors import ConfigError, Violation
from foundry.engine.agreement import on_all_ranks
from foundry.parallel.disks import Disks
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World, side_group
from foundry.run_dir.checkpoints import names_in
from foundry.run_dir.lock import LOCK, lock
from foundry.run_dir.log import NOTICE
from foundry.run_dir.marker import MARK, is_foundry_folder, mark
from foundry.run_dir.names import MIRROR
from foundry.run_dir.status import read_status

_KEY = "hydra.run.dir"
_PATIENCE_SECONDS, _LONG_PATIENCE_SECONDS = 5.0, 30.0
"""Longest wait for a new file of rank 0, since network file systems cache directories; longer if the run is refused."""

log = logging.getLogger(__name__)


def lock_run_dir(
    world: World, run_dir: Path, config_hash: str, checkpoint: Checkpoint, stack: ExitStack
) -> tuple[World, Path, str | None]:
    """Lock the run directory for this run, on every disk that has one.

    Args:
        world: this rank and its process group.
        run_dir: the run directory; that of rank 0 counts.
        config_hash: hash of the configuration.
        checkpoint: settings of checkpoints.
        stack: releases the locks at the end of the run.

    Returns:
        The world with the disks of the nodes, the run directory of rank 0, and the state of an earlier run in it, or
        None.

    Raises:
        ConfigError: the ranks composed different configurations, another process trains in the run directory, or the
            nodes do not share it although the run needs that.
    """
    state, is_free = None, True
    if world.is_main:
        is_free = lock(run_dir, stack)
        state = read_status(run_dir).get("state")
    gathered = gather((str(run_dir), config_hash, state, is_free, world.local_rank), world)
    different_ranks = [rank for rank, other in enumerate(gathered) if other[1] != gathered[0][1]]
    if different_ranks:
        raise ConfigError(
            Violation(
                "configuration",
                f"of rank {different_ranks[0]} is not rank 0's; start every rank with the same overrides",
            )
        )
    if not gathered[0][3]:
        raise _in_use(gathered[0][0])
    run_dir, state = Path(gathered[0][0]), gathered[0][2]
    is_needed_everywhere = checkpoint.mirror is not None or not checkpoint.is_off
    if is_needed_everywhere and sum(local_rank == 0 for *_, local_rank in gathered) > 1:
        world = _find_disks(world, run_dir, checkpoint, stack)
    return world, run_dir, state


def _find_disks(world: World, run_dir: Path, checkpoint: Checkpoint, stack: ExitStack) -> World:
    """Return the world with its disks, unless all ranks see the run directory of rank 0.

    Raises:
        ConfigError: a node has a local disk but the run has no mirror, or the directory on that disk cannot be used.
    """
    token, explain = gather(uuid.uuid4().hex, world)[0], partial(_explain, run_dir)
    with ExitStack() as tokens:
        write = partial(_write_token, run_dir, token, world.rank, tokens)
        on_all_ranks(lambda: write() if world.is_main else None, world, explain)
        patience = _LONG_PATIENCE_SECONDS if checkpoint.mirror is None else _PATIENCE_SECONDS
        seen = on_all_ranks(lambda: _appears(_token_file(run_dir, token, 0), patience), world, explain)
        if all(seen):
            return world
        if checkpoint.mirror is None:
            message = f"is {run_dir}, but on the node of rank {seen.index(False)} this path is on a local disk"
            raise ConfigError(
                Violation(_KEY, f"{message}; choose a folder that all nodes share, or set checkpoint.mirror=URL")
            )
        is_first = world.local_rank == 0 and not seen[world.rank]

        def prepare() -> None:
            if is_first:
                _prepare(run_dir, stack)
                write()

        on_all_ranks(prepare, world, explain)
        leaders = on_all_ranks(lambda: _find_leader(run_dir, token, world.world_size), world, explain)
    if None in leaders:
        message = f"is {run_dir}, but rank {leaders.index(None)} sees no folder there that a rank of its node has made"
        raise ConfigError(Violation(_KEY, f"{message}; mount the same disk for all ranks of a node"))
    if set(leaders) == {0}:  # the file of rank 0 has appeared meanwhile
        return world
    disks = Disks(tuple(leader for leader in leaders if leader is not None))
    world = replace(world, disks=replace(disks, group=side_group(world, disks.of_leaders)))
    _lock_disks(world, disks, run_dir, stack)
    return world


def _lock_disks(world: World, disks: Disks, run_dir: Path, stack: ExitStack) -> None:
    """Lock the run directory on the disks of all leaders, and log which ranks share a disk.

    Raises:
        ConfigError: on every rank, if another process trains in one of the directories.
    """

    def lock_own() -> None:
        if world.leads_disk and not world.is_main and not lock(run_dir, stack):
            raise _in_use(f"{run_dir} on the disk of rank {world.rank}")

    on_all_ranks(lock_own, world, partial(_explain, run_dir))
    if world.is_main:
        ranks = "; ".join(_ranges(disks.peers(leader)) for leader in disks.of_leaders)
        message = "the nodes have local disks at %s (ranks %s); each rank's shards are on the disk of its node"
        log.log(NOTICE, message, run_dir, ranks)


def _explain(run_dir: Path, error: OSError) -> Violation:
    message = f"is {run_dir}, which cannot be used: {error.strerror or error}"
    return Violation(_KEY, f"{message}; choose a folder that every node can write")


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending numbers in words, such as `0-3, 8`."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))


def _token_file(run_dir: Path, token: str, rank: int) -> Path:
    return run_dir / f".disk-{rank:05d}-{token}.partial"


def _write_token(run_dir: Path, token: str, rank: int, tokens: ExitStack) -> None:
    file = _token_file(run_dir, token, rank)
    file.touch()
    tokens.callback(file.unlink, missing_ok=True)


def _find_leader(run_dir: Path, token: str, world_size: int) -> int | None:
    """Return the lowest rank whose token is in this rank's run directory; None without one."""
    names = set(names_in(run_dir))
    return next((rank for rank in range(world_size) if _token_file(run_dir, token, rank).name in names), None)


def _appears(file: Path, seconds: float) -> bool:
    """Return whether a file exists, or appears within a number of seconds."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        for folder in (file.parent.parent, file.parent):  # reading a directory refreshes the cache of NFS
            with suppress(PermissionError):  # the folder may be closed to listing
                names_in(folder)
    return True


def _prepare(run_dir: Path, stack: ExitStack) -> None:
    """Create the run directory on the disk of another node; remove it if the run is refused before it begins.

    Raises:
        ConfigError: the directory has files that are not foundry's.
        OSError: it cannot be created.
    """
    is_new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    if any(run_dir.iterdir()) and not is_foundry_folder(run_dir):
        message = f"is {run_dir}, which has files that are not foundry's on the disk of another node"
        raise ConfigError(Violation(_KEY, f"{message}; choose another folder"))
    mark(run_dir)
    if is_new:
        stack.push(partial(_discard, run_dir))


def _discard(
    run_dir: Path, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    if kind is not None and issubclass(kind, ConfigError) and set(names_in(run_dir)) <= {LOCK, MARK, MIRROR}:
        shutil.rmtree(run_dir, ignore_errors=True)


def _in_use(place: str) -> ConfigError:
    return ConfigError(Violation(_KEY, f"is {place}, where another process trains; wait for it, or choose another"))
