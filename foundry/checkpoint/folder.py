"""Files of a checkpoint: format, publication and verification, without knowledge of tensors.

    checkpoints/step_00000200/manifest.json          description, and size and checksum of every other file
    checkpoints/step_00000200/shard-00000.safetensors the tensors of one rank
    checkpoints/step_00000200/rank-00000.json         state of one rank, such as its RNG state
    checkpoints/latest, checkpoints/best              symlinks
    checkpoints/.step_00000200.partial                checkpoint that is being written
    checkpoints/.step_00000200.removed                checkpoint that is being deleted

A folder gets its final name only after every byte in it is on disk, and is renamed before its first byte is deleted.
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

from foundry.run_dir.checkpoints import MANIFEST, NAME, names_in, removed_path, step_name
from foundry.run_dir.files import UnsafeFileError, open_regular, read_bytes, read_text, sync_path
from foundry.run_dir.names import CHECKPOINTS

FORMAT = 1
"""Format of written checkpoints, and the highest that can be read; a manifest without a format has format 1."""

_PUT_ASIDE = re.compile(NAME.pattern + r"\.corrupt[0-9]*")
_TENSORS = ".safetensors"
_CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not match the model or run that reads it."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or its size or checksum differs from the manifest."""


@dataclass(frozen=True)
class Problem:
    """A problem with a checkpoint.

    Attributes:
        message: description of the problem, with the name of the file.
        is_damage: whether a file is missing or has changed, permanently. Other problems, such as a denied permission or
            a disk error, do not prove that the checkpoint is damaged.
    """

    message: str
    is_damage: bool


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file when it was written.

    Attributes:
        bytes: size of the file.
        checksum: 128-bit XXH3 of its content, in hexadecimal.
    """

    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint.

    Attributes:
        step: optimizer steps taken.
        samples: samples consumed.
        tokens: tokens consumed; None if the data does not count tokens.
        config_hash: hash of the run's configuration.
        config: the run's configuration.
        strategy: parallel strategy of the run.
        state: further state that a resumed run needs, as JSON.
        world_size: number of ranks that wrote the checkpoint.
        versions: versions of foundry, torch and Python that wrote the checkpoint.
        metric: finite value of the run's main metric at this step; None if it was not measured or is not finite.
        files: size and checksum of every other file in the folder, by name.
        optimizer: structure of nested optimizer states; empty for flat states of named tensors.
        data: identity of the training data; empty in checkpoints that did not record it.
        base: digest and path of the base weights if the checkpoint contains only adapters; empty if it has the whole
            model.
        format: format of the checkpoint; readers ignore unknown fields within a format.
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
_POSITIVE_COUNTS = frozenset({"world_size", "format"})


def partial_path(run_dir: Path, step: int) -> Path:
    """Return the temporary path of a step's checkpoint, before it is published."""
    return run_dir / CHECKPOINTS / f".{step_name(step)}.partial"


def write_durably(path: Path, text: str) -> FileFacts:
    """Write a small new file and wait until it is on disk."""
    content = text.encode()
    with open_regular(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(len(content), xxhash.xxh3_128_hexdigest(content))


def write_json(path: Path, content: Any) -> FileFacts:
    """Write strict JSON and wait until it is on disk.

    Raises:
        ValueError: if a number is NaN or infinite.
    """
    return write_durably(path, encode_json(content))


def encode_json(content: Any) -> str:
    """Return strict JSON as foundry writes it into checkpoints.

    Raises:
        ValueError: if a number is NaN or infinite.
    """
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest and give a checkpoint its final name, after all its other files are on disk.

    An existing folder of that name is first renamed to a name that `remove_leftovers` deletes.

    Args:
        partial: the temporary folder with the other files of the checkpoint.
        manifest: the manifest, with size and checksum of all these files.

    Returns:
        The folder with its final name.

    Raises:
        ValueError: if a number in the manifest is NaN or infinite.
    """
    return publish_encoded(partial, manifest.step, encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> str:
    """Return the content of a manifest's file.

    Raises:
        ValueError: if a number in the manifest is NaN or infinite.
    """
    content = json.loads(json.dumps(asdict(manifest), allow_nan=False))  # with JSON's types, as they are read back
    # The checksum detects changes of the manifest itself.
    return encode_json({"checksum": _checksum_of_json(content), **content})


def publish_encoded(partial: Path, step: int, manifest: str) -> Path:
    """Publish a checkpoint as `publish` does, with the encoded manifest, which is the same on every disk."""
    write_durably(partial / MANIFEST, manifest)
    sync_path(partial)
    folder = partial.with_name(step_name(step))
    if folder.exists():
        folder.rename(removed_path(folder))
    partial.rename(folder)
    sync_path(folder.parent)
    return folder


def link(folder: Path, name: str) -> None:
    """Atomically point the symlink `checkpoints/<name>` to a checkpoint.

    The symlink is relative, so a run directory can be moved.
    """
    fresh = folder.with_name(f".{name}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(folder.with_name(name))
    sync_path(folder.parent)


def manifest_checksum(folder: Path) -> str:
    """Return the 128-bit XXH3 of the file of a checkpoint's manifest.

    Raises:
        OSError: the file cannot be read.
    """
    return xxhash.xxh3_128_hexdigest(read_bytes(folder / MANIFEST))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Unknown fields are ignored, and missing fields have their default values.

    Raises:
        DamagedError: if the manifest is missing, incomplete or changed.
        CheckpointError: if the manifest is intact, but has a newer format or was not written by foundry.
        OSError: if the manifest cannot be read.
    """
    try:
        text = read_text(folder / MANIFEST)
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{MANIFEST} is not text") from None
    try:
        content = json.loads(text)
        _check_format(content)  # first, since a later format may use another checksum
        checksum = content.pop("checksum")
        actual = _checksum_of_json(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is incomplete or not a manifest ({len(text)} characters)") from None
    if checksum != actual:
        raise DamagedError(f"{MANIFEST} does not match its checksum {checksum}")
    values = {item.name: content[item.name] for item in fields(Manifest) if item.name in content}
    if invalid := [name for name, value in values.items() if not _has_valid_type(name, value)]:
        raise CheckpointError(f"{MANIFEST} has an invalid {invalid[0]}")
    try:
        values["files"] = {name: _parse_facts(name, facts) for name, facts in values.get("files", {}).items()}
        return Manifest(**values)
    except TypeError:
        raise CheckpointError(f"{MANIFEST} has no step") from None


def _has_valid_type(name: str, value: Any) -> bool:
    """Return whether a field of a manifest has the right type and, if it is a count, is in the valid range."""
    if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
        return False
    if name not in _COUNTS or not isinstance(value, int):
        return True
    return int(name in _POSITIVE_COUNTS) <= value < 2**63


def _check_format(content: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the manifest's format requires a later version of foundry."""
    format_version = content.get("format", FORMAT)
    if isinstance(format_version, (int, float)) and format_version > FORMAT:
        versions = content.get("versions")
        writer = versions.get("foundry") if isinstance(versions, dict) else None
        version = f"foundry {writer} or later" if writer else "a later version of foundry"
        raise CheckpointError(
            f"{MANIFEST} has format {format_version}, but this foundry supports formats up to {FORMAT}: use {version}"
        )


def _parse_facts(name: str, facts: Any) -> FileFacts:
    """Return size and checksum of a file; the name must not lead out of the folder."""
    if not name or name.startswith(".") or {"/", "\\", "\0"} & set(name) or name == MANIFEST:
        raise CheckpointError(f"{MANIFEST} lists {name!r}, which is not a file of a checkpoint")
    size, checksum = (facts.get(key) if isinstance(facts, dict) else None for key in ("bytes", "checksum"))
    if type(size) is not int or size < 0 or not isinstance(checksum, str):
        raise CheckpointError(f"{MANIFEST} has no size or checksum for {name}")
    return FileFacts(size, checksum)


def list_put_aside(run_dir: Path) -> list[Path]:
    """Return the damaged checkpoints of a run that were renamed, to names that end in `.corrupt` or `.corrupt<N>`."""
    names = names_in(run_dir / CHECKPOINTS)
    return [run_dir / CHECKPOINTS / name for name in sorted(names) if _PUT_ASIDE.fullmatch(name)]


def problems(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return the messages of the problems found by `examine`."""
    return [problem.message for problem in examine(folder, part=part, num_parts=num_parts)]


def examine(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[Problem]:
    """Return the problems of a checkpoint; empty if it is intact.

    Every file in the manifest is read completely, at the speed of the disk; symlinks, pipes and devices are not opened.

    Args:
        folder: the checkpoint.
        part: index of the first file to check, in the order of names; after it, every `num_parts`-th file is checked.
        num_parts: number of processes that divide the files among themselves.
    """
    try:
        if folder.is_symlink():
            raise UnsafeFileError(folder, "a symbolic link", "a checkpoint")
        manifest = read_manifest(folder)
        # Without an index, the reader opens all shards in the folder, including files that are not in the manifest.
        if unlisted := sorted({name for name in names_in(folder) if name.endswith(_TENSORS)} - set(manifest.files)):
            return [Problem(f"{unlisted[0]} is not listed in {MANIFEST}; remove it", is_damage=False)]
    except CheckpointError as error:
        return [Problem(str(error), isinstance(error, DamagedError))]
    except OSError as error:
        return [_unreadable(folder / MANIFEST, error)]
    names = sorted(manifest.files)[part::num_parts]
    return [problem for name in names for problem in file_problems(folder / name, manifest.files[name])]


def file_problems(path: Path, facts: FileFacts) -> Iterator[Problem]:
    """Yield the problem of a file that is missing, differs from the manifest, or cannot be read."""
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
        # Only the file's name, because the caller's message contains the folder.
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
