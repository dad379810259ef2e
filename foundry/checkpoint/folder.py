"""Checkpoints as files: what a folder holds, how it is published, found and verified. No tensor is known here.

    checkpoints/step_00000200/manifest.json          what it is, and size and checksum of every other file
    checkpoints/step_00000200/shard-00000.safetensors the tensors of one rank
    checkpoints/step_00000200/rank-00000.json         what only that rank knows, such as its random numbers
    checkpoints/latest, checkpoints/best              links
    checkpoints/.step_00000200.partial                being written
    checkpoints/.step_00000200.removed                being deleted

A folder has its final name only when every byte in it is on the disk, and loses it before the first byte is deleted.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import xxhash

from foundry.run_dir.checkpoints import MANIFEST, NAME, names_in, step_name
from foundry.run_dir.files import UnsafeFileError, open_regular, read_text, sync_path
from foundry.run_dir.names import CHECKPOINTS

FORMAT = 1
"""Of the checkpoints that are written, and the highest that is read; a manifest that names none is of format 1."""

_PUT_ASIDE = re.compile(NAME.pattern + r"\.corrupt[0-9]*")
_TENSORS = ".safetensors"
_CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit what it is to be read into."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or has another size or checksum than it should."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a checkpoint.

    Attributes:
        message: names the file and what is wrong with it.
        is_damage: a file is missing or its bytes are others, for good. Anything else, such as a denied permission or a
            disk that does not answer, says nothing about the checkpoint itself.
    """

    message: str
    is_damage: bool


@dataclass(frozen=True)
class FileFacts:
    """What a file must be.

    Attributes:
        bytes: its size.
        checksum: of its content, XXH3 of 128 bits in hexadecimal.
    """

    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps taken.
        samples: samples consumed.
        tokens: tokens consumed; None where the data has none.
        config_hash: of the run's configuration.
        config: the configuration.
        strategy: how the model was wrapped.
        state: what else a resumed run needs; any JSON.
        world_size: ranks that wrote it.
        versions: of the libraries that wrote it.
        metric: by which the run is judged, at this step, where it was measured and finite.
        files: every other file of the folder.
        optimizer: how nested state of optimizers is made up of tensors; empty for state that is tensors by name.
        data: what tells the data from other data; empty in checkpoints that did not say it.
        base: digest and path of the weights beside which adapters were trained, which are all that the checkpoint then
            holds; empty where it holds the whole model.
        format: of the checkpoint; a field that is unknown within a format may be ignored.
    """

    step: int
    samples: int = 0
    tokens: int | None = None
    config_hash: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    metric: float | None = None
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT


_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("config", "state", "versions", "files", "data", "optimizer", "base"), dict),
    **dict.fromkeys(("step", "samples", "world_size", "format"), int),
    **dict.fromkeys(("config_hash", "strategy"), str),
    "tokens": (int, type(None)),
    "metric": (int, float, type(None)),
}


_COUNTS = frozenset({"step", "samples", "tokens", "world_size", "format"})
_FROM_ONE = frozenset({"world_size", "format"})


def partial_path(run_dir: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it is published."""
    return run_dir / CHECKPOINTS / f".{step_name(step)}.partial"


def write_durably(path: Path, text: str) -> FileFacts:
    """Write a small new file and wait until it is on the disk."""
    content = text.encode()
    with open_regular(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(len(content), xxhash.xxh3_128_hexdigest(content))


def write_json(path: Path, content: Any) -> FileFacts:
    """Write strict JSON durably.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return write_durably(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def publish(partial: Path, manifest: Manifest) -> Path:
    """Give a checkpoint its final name, once all its other files are on the disk.

    What has that name already is first renamed to a name that `remove_leftovers` deletes.

    Args:
        partial: the folder as it was written.
        manifest: of all files.

    Returns:
        The folder under its final name.

    Raises:
        ValueError: a number in the manifest is NaN or infinite.
    """
    content = json.loads(json.dumps(asdict(manifest), allow_nan=False))  # with the names and lists that are read back
    # A changed byte in the manifest itself is noticed too.
    write_json(partial / MANIFEST, {"checksum": _checksum_of_json(content), **content})
    sync_path(partial)
    folder = partial.with_name(step_name(manifest.step))
    if folder.exists():
        folder.rename(removed_path(folder))
    partial.rename(folder)
    sync_path(folder.parent)
    return folder


def removed_path(folder: Path) -> Path:
    """The name under which a folder is deleted."""
    return folder.with_name(f".{folder.name}.removed")


def link(folder: Path, name: str) -> None:
    """Let `checkpoints/<name>` point to a checkpoint, in one step; relative, so that a run directory can move."""
    fresh = folder.with_name(f".{name}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(folder.with_name(name))
    sync_path(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself.

    Fields that this version does not know are ignored, and those that are missing have their defaults.

    Raises:
        DamagedError: the manifest is missing, half-written or changed.
        CheckpointError: it is whole, but of a newer format, or not one that foundry writes.
        OSError: it cannot be read.
    """
    try:
        text = read_text(folder / MANIFEST)
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{MANIFEST} is no text") from None
    try:
        content = json.loads(text)
        _check_format(content)  # first: a later format may have another checksum
        checksum = content.pop("checksum")
        found = _checksum_of_json(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is half-written, or no manifest ({len(text)} characters)") from None
    if checksum != found:
        raise DamagedError(f"{MANIFEST} does not have the checksum {checksum} that it names")
    known = {item.name: content[item.name] for item in fields(Manifest) if item.name in content}
    if wrong := [name for name, value in known.items() if not _fits(name, value)]:
        raise CheckpointError(f"{MANIFEST} has no {wrong[0]} that foundry has written")
    try:
        known["files"] = {name: _parse_facts(name, facts) for name, facts in known.get("files", {}).items()}
        return Manifest(**known)
    except TypeError:
        raise CheckpointError(f"{MANIFEST} names no step") from None


def _fits(name: str, value: Any) -> bool:
    """Return whether a field of a manifest has its type; whole numbers count something, so that none is negative."""
    if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
        return False
    if name not in _COUNTS or not isinstance(value, int):
        return True
    return int(name in _FROM_ONE) <= value < 2**63


def _check_format(content: Mapping[str, Any]) -> None:
    """Refuse what only a later version can read."""
    written = content.get("format", FORMAT)
    if isinstance(written, (int, float)) and written > FORMAT:
        versions = content.get("versions")
        by = versions.get("foundry") if isinstance(versions, dict) else None
        version = f"foundry {by} or later" if by else "a later foundry"
        raise CheckpointError(f"{MANIFEST} is of format {written}, this foundry reads up to {FORMAT}: use {version}")


def _parse_facts(name: str, facts: Any) -> FileFacts:
    """Size and checksum of a file, whose name stays within the folder."""
    if not name or name.startswith(".") or {"/", "\\", "\0"} & set(name) or name == MANIFEST:
        raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
    size, checksum = (facts.get(key) if isinstance(facts, dict) else None for key in ("bytes", "checksum"))
    if type(size) is not int or size < 0 or not isinstance(checksum, str):
        raise CheckpointError(f"{MANIFEST} does not say size and checksum of {name}")
    return FileFacts(size, checksum)


def list_put_aside(run_dir: Path) -> list[Path]:
    """What had been a checkpoint until it was found damaged."""
    names = names_in(run_dir / CHECKPOINTS)
    return [run_dir / CHECKPOINTS / name for name in sorted(names) if _PUT_ASIDE.fullmatch(name)]


def problems(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, in lines; nothing is, if the list is empty. As `examine`."""
    return [problem.message for problem in examine(folder, part=part, num_parts=num_parts)]


def examine(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[Problem]:
    """What is wrong with a checkpoint, and whether that is damage; nothing is, if the list is empty.

    Every file is read, at the speed of the disk; links, pipes and devices are not.

    Args:
        folder: the checkpoint.
        part: check every `num_parts`-th file, from this one on, so that ranks can share the work.
        num_parts: among how many the work is shared.
    """
    try:
        if folder.is_symlink():
            raise UnsafeFileError(folder, "a symbolic link", "a checkpoint")
        manifest = read_manifest(folder)
        # The reader of tensors opens all of them, named in the manifest or not.
        if strangers := sorted({name for name in names_in(folder) if name.endswith(_TENSORS)} - set(manifest.files)):
            return [Problem(f"{strangers[0]} is not named in {MANIFEST}; remove it", is_damage=False)]
    except CheckpointError as error:
        return [Problem(str(error), isinstance(error, DamagedError))]
    except OSError as error:
        return [_unreadable(folder / MANIFEST, error)]
    names = sorted(manifest.files)[part::num_parts]
    return [problem for name in names for problem in _file_problems(folder / name, manifest.files[name])]


def _file_problems(path: Path, facts: FileFacts) -> Iterator[Problem]:
    try:
        with open_regular(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != facts.bytes:
                yield Problem(f"{path.name} has {size} bytes, not {facts.bytes}", is_damage=True)
            elif (checksum := _checksum(file)) != facts.checksum:
                yield Problem(f"{path.name} has the checksum {checksum}, not {facts.checksum}", is_damage=True)
    except FileNotFoundError:
        yield Problem(f"{path.name} is missing", is_damage=True)
    except OSError as error:
        yield _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> Problem:
    if isinstance(error, UnsafeFileError):
        # Whoever shows it names the folder.
        return Problem(f"{Path(error.filename).name} {error.strerror}", is_damage=False)
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return Problem(f"{path.name} cannot be read ({error.strerror or error}, {name})", is_damage=False)


def _checksum(file: IO[bytes]) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    while count := file.readinto(buffer):  # type: ignore[attr-defined] # opened without a buffer
        digest.update(view[:count])
    return digest.hexdigest()


def _checksum_of_json(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, allow_nan=False).encode())
