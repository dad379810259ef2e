"""Verification of checkpoints whose files are on several disks, and exchange of these files between the disks.

Each node may have a local disk, with the shards of its ranks. Every disk has the same manifest. A
checkpoint is intact if each of its files is intact on at least one disk. Before it is read, every disk receives the
files that it lacks from another disk, since a rank may read any shard: replicated tensors are divided among all ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import ProcessGroup

from foundry.checkpoint.folder import (
    CheckpointError,
    DamagedError,
    FileFacts,
    Problem,
    file_problems,
    manifest_checksum,
    read_manifest,
    write_durably,
)
from foundry.checkpoint.verification import find_damage_on_all_ranks, together, verify_newest
from foundry.parallel.disks import Disks
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, parse_step
from foundry.run_dir.files import open_regular, read_text, sync_path
from foundry.run_dir.mirror.fetching import begin_checkpoint, end_checkpoint, partial_folder

_PIECE_BYTES = 2**26


@dataclass(frozen=True)
class _Part:
    """Files of a checkpoint that one rank has examined on its disk.

    Attributes:
        manifest: checksum of the manifest on this disk; None if it cannot be read.
        problem: error of reading the manifest; None if it can.
        intact: names of intact files.
        problems: problem of each other file, by name.
    """

    manifest: str | None = None
    problem: Problem | None = None
    intact: list[str] = field(default_factory=list)
    problems: dict[str, Problem] = field(default_factory=dict)


@dataclass(frozen=True)
class _Survey:
    """State of a checkpoint on all disks, the same on every rank.

    Attributes:
        with_manifest: leaders of the disks that have the manifest of the disk of rank 0.
        holders: leaders of the disks that have a file intact, by the name of the file.
        damage: damage of the checkpoint, a line each.
    """

    with_manifest: frozenset[int] = frozenset()
    holders: Mapping[str, set[int]] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)


def find_newest(run_dir: Path, world: World, alive: Callable[[], None] | None = None) -> Path | None:
    """Return a run's newest intact checkpoint as `verify_newest` does; afterwards every disk has all of its files.

    Only checkpoints on the disk of rank 0, which publishes last, are considered.

    Args:
        run_dir: the run directory.
        world: all its ranks call this function together.
        alive: heartbeat for the watchdog, called for each piece of a file that is exchanged.
    """
    if world.disks is None:
        return verify_newest(run_dir, world)
    return verify_newest(run_dir, world, partial(complete_on_all_disks, alive=alive))


def find_damage(folder: Path, world: World, group: ProcessGroup | None = None) -> list[str]:
    """Return the damage of a checkpoint of the run directory, a line each; changes no file.

    Args:
        folder: the checkpoint.
        world: all its ranks call this function together.
        group: process group for the communication; None for the default group.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read.
    """
    if world.disks is None:
        return find_damage_on_all_ranks(folder, world, group)
    return _survey(folder, world, world.disks, group).damage


def complete_on_all_disks(folder: Path, world: World, *, alive: Callable[[], None] | None = None) -> list[str]:
    """Return the damage of a checkpoint, a line each; if it is intact, give every disk the files that it lacks.

    Args:
        folder: the checkpoint, which has the same path on every disk.
        world: all its ranks call this function together.
        alive: heartbeat, called for each piece of a file that is exchanged.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read, or a disk cannot be written.
    """
    assert world.disks is not None
    survey = _survey(folder, world, world.disks, None)
    if not survey.damage:
        _exchange(folder, survey, world, world.disks, alive or (lambda: None))
    return survey.damage


def _survey(folder: Path, world: World, disks: Disks, group: ProcessGroup | None) -> _Survey:
    """Examine a checkpoint on all disks; the ranks of a disk divide its files among themselves."""
    head, files = _read_manifest(folder)
    main = gather(head, world, group)[0]
    if main.problem is not None:
        if not main.problem.is_damage:
            raise CheckpointError(f"{folder}: {main.problem.message}")
        return _Survey(damage=[main.problem.message])
    part = head
    if head.manifest == main.manifest:
        peers = disks.peers(world.rank)
        part = _examine(folder, head.manifest, files, peers.index(world.rank), len(peers))
    parts = gather(part, world, group)
    holders = defaultdict[str, set[int]](set)
    for rank, other in enumerate(parts):
        for name in other.intact:
            holders[name].add(disks.leaders[rank])
    names = sorted(gather(list(files) if world.is_main else [], world, group)[0])
    lost = [name for name in names if name not in holders]
    problems = [problem for other in parts for name, problem in other.problems.items() if name in lost]
    if lost:  # they may be intact on a disk whose manifest cannot be read now
        problems += [other.problem for other in parts if other.problem is not None and not other.problem.is_damage]
    if unreadable := sorted({problem.message for problem in problems if not problem.is_damage}):
        raise CheckpointError(f"{folder}: {'; '.join(unreadable)}")
    with_manifest = frozenset(
        disks.leaders[rank] for rank, other in enumerate(parts) if other.manifest == main.manifest
    )
    reported = {name for other in parts for name in other.problems}
    damage = {problem.message for problem in problems} | {f"{name} is missing" for name in lost if name not in reported}
    return _Survey(with_manifest, holders, sorted(damage))


def _read_manifest(folder: Path) -> tuple[_Part, Mapping[str, FileFacts]]:
    """Return the checksum of the manifest, or the error of reading it, and the files that it lists."""
    try:
        files = read_manifest(folder).files
        return _Part(manifest=manifest_checksum(folder)), files
    except CheckpointError as error:
        return _Part(problem=Problem(str(error), isinstance(error, DamagedError))), {}
    except OSError as error:
        return _Part(problem=Problem(f"{MANIFEST} cannot be read ({error.strerror or error})", is_damage=False)), {}


def _examine(folder: Path, manifest: str | None, files: Mapping[str, FileFacts], part: int, num_parts: int) -> _Part:
    """Examine every `num_parts`-th file of a checkpoint, from the file number `part` on."""
    intact, problems = list[str](), dict[str, Problem]()
    for name in sorted(files)[part::num_parts]:
        problem = next(file_problems(folder / name, files[name]), None)
        if problem is None:
            intact.append(name)
        else:
            problems[name] = problem
    return _Part(manifest=manifest, intact=intact, problems=problems)


def _exchange(folder: Path, survey: _Survey, world: World, disks: Disks, alive: Callable[[], None]) -> None:
    """Copy each file to the disks that lack it, from the disk with the lowest leader that has it.

    All ranks communicate after each piece of 64 MiB, so that no rank waits longer than the timeout of collectives.
    """
    leaders = disks.of_leaders
    lacking = {name: [leader for leader in leaders if leader not in held] for name, held in survey.holders.items()}
    receivers = {leader for names in lacking.values() for leader in names}
    if not receivers:
        return
    run_dir, step = folder.parents[1], parse_step(folder)

    def begin() -> tuple[dict[str, FileFacts], str]:
        if world.rank in receivers:
            begin_checkpoint(run_dir, step)
        return (dict(read_manifest(folder).files), read_text(folder / MANIFEST)) if world.is_main else ({}, "")

    files, manifest = together(begin, world)[0]
    for name in sorted(lacking):
        if lacking[name]:
            _copy(folder, name, files[name], min(survey.holders[name]), lacking[name], world, disks, alive)

    def end() -> None:
        if world.rank in receivers:
            if world.rank not in survey.with_manifest:
                write_durably(partial_folder(run_dir, step) / MANIFEST, manifest)
            end_checkpoint(run_dir, step)

    together(end, world)


def _copy(
    folder: Path,
    name: str,
    facts: FileFacts,
    source: int,
    receivers: list[int],
    world: World,
    disks: Disks,
    alive: Callable[[], None],
) -> None:
    """Copy a file from the disk of the rank `source` to the disks of other leaders, and verify it there.

    Raises:
        CheckpointError: on every rank, if a rank cannot read or write the file, or received other content.
    """
    target, digest = partial_folder(folder.parents[1], parse_step(folder)) / name, xxhash.xxh3_128()
    is_receiver, is_leader = world.rank in receivers, world.leads_disk
    with ExitStack() as stack:

        def start() -> IO[Any] | None:
            if world.rank == source:
                return stack.enter_context(open_regular(folder / name, "rb"))
            return stack.enter_context(open_regular(target, "xb")) if is_receiver else None

        stream = _on_this_rank(start, world)
        for begin in range(0, facts.bytes, _PIECE_BYTES):
            piece = torch.zeros(min(_PIECE_BYTES, facts.bytes - begin) if is_leader else 0, dtype=torch.uint8)
            view = memoryview(piece.numpy())  # type: ignore[arg-type] # numpy's arrays are buffers

            def read(view: memoryview = view) -> None:
                if world.rank == source and stream is not None and stream.readinto(view) != len(view):
                    raise CheckpointError(f"{folder / name} is shorter than {facts.bytes} bytes")

            def write(view: memoryview = view) -> None:
                if is_receiver and stream is not None:
                    digest.update(view)
                    stream.write(view)
                    stream.flush()  # an error of the disk must be raised here, so that all ranks raise it

            together(read, world)
            if is_leader:
                dist.broadcast(piece, source, group=disks.group)
            together(write, world)
            alive()

    def check() -> None:
        if is_receiver:
            if digest.hexdigest() != facts.checksum:
                raise CheckpointError(f"{name} has changed while it was copied to the disk of rank {world.rank}")
            sync_path(target)

    together(check, world)


def _on_this_rank(work: Any, world: World) -> Any:
    """Call a function on every rank and return the result of this rank, which other ranks do not receive.

    Raises:
        CheckpointError: on every rank, if any rank failed.
    """
    results = list[Any]()
    together(lambda: results.append(work()), world)
    return results[0]
