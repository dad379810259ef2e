"""Checkpoints as files: what a folder holds, how it is published, found and verified. No tensor is known here.

    checkpoints/step_00000200/manifest.json          what it is, and size and checksum of every other file
    checkpoints/step_00000200/shard-00000.safetensors the tensors of one rank
    checkpoints/step_00000200/rank-00000.json         what only that rank knows, such as its random numbers
    checkpoints/latest, checkpoints/best              links
    checkpoints/.step_00000200.partial                being written
    checkpoints/.step_00000200.removed                being deleted

A folder has its final name only when every byte in it is on the disk, and loses it before the first byte is deleted.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

MANIFEST, LATEST, BEST = "manifest.json", "latest", "best"
_NAME = re.compile(r"step_(\d{8,})")
_CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit what it is to be read into."""


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
        metric: the held-out loss at this step, where it was measured and finite.
        files: every other file of the folder.
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


def step_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def partial_of(run_dir: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it is published."""
    return run_dir / "checkpoints" / f".{step_name(step)}.partial"


def write_durably(path: Path, text: str) -> FileFacts:
    """Write a small new file and wait until it is on the disk."""
    content = text.encode()
    with path.open("wb") as file:
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
    _sync_folder(partial)
    folder = partial.with_name(step_name(manifest.step))
    if folder.exists():
        folder.rename(removed_of(folder))
    partial.rename(folder)
    _sync_folder(folder.parent)
    return folder


def removed_of(folder: Path) -> Path:
    """The name under which a folder is deleted."""
    return folder.with_name(f".{folder.name}.removed")


def link(folder: Path, name: str) -> None:
    """Let `checkpoints/<name>` point to a checkpoint, in one step; relative, so that a run directory can move."""
    fresh = folder.with_name(f".{name}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(folder.with_name(name))
    _sync_folder(folder.parent)


def linked_step(run_dir: Path, name: str) -> int | None:
    """The step that a link points to; None where there is no such link or folder."""
    path = run_dir / "checkpoints" / name
    return step_of(path.resolve()) if path.is_symlink() and path.is_dir() else None


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: the manifest is missing, half-written or changed.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{MANIFEST} is no text") from None
    try:
        content = json.loads(text)
        checksum = content.pop("checksum")
        if checksum != _checksum_of_json(content):
            raise CheckpointError(f"{MANIFEST} does not have the checksum {checksum} that it names")
        files = {name: FileFacts(**facts) for name, facts in content.pop("files").items()}
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{MANIFEST} is half-written, or no manifest ({len(text)} characters)") from None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The published checkpoints, newest first, whole or not."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def find(run_dir: Path, which: str = "last") -> Path:
    """The folder of a run's checkpoint.

    Args:
        run_dir: the run directory.
        which: "last", "best", or the number of a step.

    Raises:
        FileNotFoundError: there is none; the message lists those there are.
    """
    there = [folder for folder in list_checkpoints(run_dir) if (folder / MANIFEST).is_file()]
    if which in ("last", "best"):
        step = linked_step(run_dir, LATEST if which == "last" else BEST)
        # Killed between publishing its first checkpoint and pointing to it, a run has one that no link names.
        found = there[:1] if which == "last" and step is None else [f for f in there if step_of(f) == step]
    else:
        found = [folder for folder in there if which.isdecimal() and step_of(folder) == int(which)]
    if not found:
        names = ", ".join(folder.name for folder in reversed(there)) or "none"
        raise FileNotFoundError(f"{run_dir} has no checkpoint {which!r}; there are: {names}")
    return found[0].resolve()


def problems(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint; nothing is, if the list is empty.

    Every file is read, at the speed of the disk.

    Args:
        folder: the checkpoint.
        part: check every `num_parts`-th file, from this one on, so that ranks can share the work.
        num_parts: among how many the work is shared.
    """
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    names = sorted(manifest.files)[part::num_parts]
    return [problem for name in names for problem in _file_problems(folder / name, manifest.files[name])]


def _file_problems(path: Path, facts: FileFacts) -> Iterator[str]:
    try:
        size = path.stat().st_size
        if size != facts.bytes:
            yield f"{path.name} has {size} bytes, not {facts.bytes}"
        elif (checksum := _checksum(path)) != facts.checksum:
            yield f"{path.name} has the checksum {checksum}, not {facts.checksum}"
    except FileNotFoundError:
        yield f"{path.name} is missing"
    except OSError as error:
        yield f"{path.name} cannot be read ({error.strerror})"


def _checksum(path: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _checksum_of_json(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, allow_nan=False).encode())


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
