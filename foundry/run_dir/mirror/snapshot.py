"""Records of a mirror: the objects of one checkpoint and of the small files of its run.

    run.json                                             identity of the run
    lease.json                                           process that writes
    latest.json                                          snapshot of the small files
    files/metrics.jsonl.<checksum>                       a part of a small file
    checkpoints/step_00000200/<file>.<checksum>          a file of a checkpoint
    checkpoints/step_00000200/published.json             snapshot, written last: without it there is no checkpoint

Objects are named after the checksum of their content, so none is ever changed, and one that is complete is not copied
again.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import xxhash

from foundry.run_dir.checkpoints import MANIFEST, NAME, step_name
from foundry.run_dir.mirror.store import MissingObjectError, Store, TooLargeError
from foundry.run_dir.names import CHECKPOINTS, RESULT, STATUS

IDENTITY, LATEST, PUBLISHED, FILES = "run.json", "latest.json", "published.json", "files"
FORMAT = 1
"""Format of written snapshots, and the highest that can be read."""

OF_THE_END = (STATUS, RESULT)
"""Files that may record the end of the run, at a later step than that of a checkpoint."""


class DamagedMirrorError(ValueError):
    """An object of a mirror is missing, incomplete, changed, or not one that foundry wrote there."""


class LaterFormatError(ValueError):
    """A snapshot was written by a later version of foundry."""


@dataclass(frozen=True)
class Part:
    """A part of a file, or all of it.

    Attributes:
        object: name of the object in the store.
        bytes: size.
        checksum: 128-bit XXH3 of the content, in hexadecimal.
    """

    object: str
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint and the small files of its run, or these files alone.

    Attributes:
        run: identity of the run.
        step: optimizer step of the checkpoint; for small files alone, of the newest checkpoint, or None.
        best: step of the best checkpoint; None if no checkpoint is the best.
        checkpoint: each file of the checkpoint, by its name.
        files: parts of each small file in their order, by its path in the run directory.
        number: position of the snapshot among all snapshots of the run, in the order of writing.
        format: format of the snapshot.
    """

    run: str
    step: int | None = None
    best: int | None = None
    checkpoint: Mapping[str, Part] = field(default_factory=dict)
    files: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    number: int = 0
    format: int = FORMAT

    @property
    def objects(self) -> set[str]:
        """Names of all objects of the small files."""
        return {part.object for parts in self.files.values() for part in parts}

    def without_end(self) -> "Snapshot":
        """Return the snapshot without the files that may record the end of the run."""
        return replace(self, files={name: parts for name, parts in self.files.items() if name not in OF_THE_END})

    def encode(self) -> bytes:
        """Return the JSON of the snapshot, with a checksum of itself."""
        content = json.loads(json.dumps(asdict(self)))
        return json.dumps({"checksum": checksum_of(content), **content}, indent=1).encode() + b"\n"


def decode(content: bytes) -> Snapshot:
    """Return the snapshot in the content of an object.

    Raises:
        DamagedMirrorError: the content is not a whole snapshot.
        LaterFormatError: it has a later format.
    """
    try:
        values: dict[str, Any] = json.loads(content)
        if values.get("format", FORMAT) > FORMAT:
            raise LaterFormatError(f"has format {values['format']}; use a later version of foundry")
        if values.pop("checksum") != checksum_of(values):
            raise DamagedMirrorError("does not match its checksum")
        checkpoint = {_relative(name): _part(part) for name, part in values["checkpoint"].items()}
        files = {_relative(name): tuple(map(_part, parts)) for name, parts in values["files"].items()}
        step, best = (None if (value := values[name]) is None else int(value) for name in ("step", "best"))
        number = int(values["number"])
        return Snapshot(run=str(values["run"]), step=step, best=best, checkpoint=checkpoint, files=files, number=number)
    except (DamagedMirrorError, LaterFormatError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise DamagedMirrorError(f"is incomplete or not a snapshot ({len(content)} bytes)") from None


def read_snapshot(store: Store, name: str, run: str) -> Snapshot:
    """Return a snapshot of a run.

    Raises:
        MissingObjectError: it does not exist.
        DamagedMirrorError: it is damaged, or belongs to another run or step.
        LaterFormatError: it has a later format.
        StoreError: it cannot be read.
    """
    try:
        snapshot = decode(store.read(name))
    except DamagedMirrorError as error:
        raise DamagedMirrorError(f"{name} {error}") from None
    except LaterFormatError as error:
        raise LaterFormatError(f"{name} {error}") from None
    except TooLargeError as error:
        raise DamagedMirrorError(str(error)) from None
    folder = PurePosixPath(name).parent.name
    if snapshot.run != run or (NAME.fullmatch(folder) and snapshot.step != step_of(folder)):
        raise DamagedMirrorError(f"{name} belongs to another run or step")
    if NAME.fullmatch(folder) and MANIFEST not in snapshot.checkpoint:
        raise DamagedMirrorError(f"{name} lists no {MANIFEST}")
    return snapshot


def folder_of(step: int) -> str:
    """Return the folder of a step's checkpoint in the store."""
    return f"{CHECKPOINTS}/{step_name(step)}"


def step_of(folder: str) -> int | None:
    """Return the step of a checkpoint folder; None for another name."""
    match = NAME.fullmatch(folder)
    return None if match is None else int(match[1])


def list_published(store: Store) -> list[int]:
    """Return the steps of all published checkpoints in a store, highest first.

    Raises:
        StoreError: the store cannot be read.
    """
    names = (PurePosixPath(name) for name in store.sizes(CHECKPOINTS) if name.endswith(f"/{PUBLISHED}"))
    steps = (step_of(str(name.parent)) for name in names)
    return sorted((step for step in steps if step is not None), reverse=True)


def read_published(store: Store, run: str) -> tuple[dict[int, Snapshot], dict[int, str]]:
    """Return the published snapshots of a run by step, and for each damaged one the reason.

    Raises:
        LaterFormatError: a snapshot has a later format.
        StoreError: the store cannot be read.
    """
    snapshots, damaged = dict[int, Snapshot](), dict[int, str]()
    for step in list_published(store):
        try:
            snapshots[step] = read_snapshot(store, f"{folder_of(step)}/{PUBLISHED}", run)
        except MissingObjectError:  # deleted meanwhile by the process that writes
            continue
        except DamagedMirrorError as error:
            damaged[step] = str(error)
    return snapshots, damaged


def newest_files(*snapshots: Snapshot | None) -> list[Mapping[str, tuple[Part, ...]]]:
    """Return the small files of each snapshot that is not None, the last snapshot first."""
    present = [snapshot for snapshot in snapshots if snapshot is not None]
    return [snapshot.files for snapshot in sorted(present, key=lambda snapshot: -snapshot.number)]


def checksum_of(content: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON object."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def unreferenced(objects: Iterable[str], snapshots: Iterable[Snapshot]) -> set[str]:
    """Return the objects of small files that no snapshot contains."""
    return set(objects).difference(*(snapshot.objects for snapshot in snapshots))


def _part(value: Mapping[str, Any]) -> Part:
    part = Part(_relative(value["object"]), int(value["bytes"]), str(value["checksum"]))
    if part.bytes < 0:
        raise DamagedMirrorError("has a negative size")
    return part


def _relative(name: object) -> str:
    """Return a name from a store that stays within its folder.

    Raises:
        DamagedMirrorError: the name is absolute, has `..`, or is empty.
    """
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise DamagedMirrorError("has a name that is not a path")
    if name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
        raise DamagedMirrorError(f"has {name!r}, which leads out of its folder")
    return name
