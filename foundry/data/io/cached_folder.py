"""Cache folders: written once, published atomically, shared by all ranks and runs, and verified before use."""

import errno
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.files import read_text, sync_path, write_atomically
from foundry.run_dir.lock import LOCK, is_held, lock

_HEAD_START_SECONDS = 0.5
_MANIFEST, _VERIFIED = "manifest.json", ".verified"
_CHUNK_BYTES = 2**24
_ALWAYS_BYTES = 2**28
"""Folders up to this size are verified at each use, which takes a tenth of a second."""

_STAMP_SECONDS = 24 * 3600.0
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.\w+(\.damaged)?")
_ABANDONED_SECONDS = 7 * 24 * 3600.0
log = logging.getLogger(__name__)


def cached_folder(
    cache_dir: str, name: str, fill: Callable[[Path], tuple[str, ...]], *, contents: str = "tokens"
) -> Path:
    """Return a folder of the cache, and create it if it is missing or damaged.

    Creation is atomic and durable. If several processes call this at once, one creates the folder and the others wait.

    Args:
        cache_dir: parent folder of the cache.
        name: name of the folder, a hash of everything on which its content depends: 32 hexadecimal digits.
        fill: writes the files into the given folder, and returns their names.
        contents: the content of the folder, for messages.

    Raises:
        ConfigError: the cache cannot be written, or `fill` raises an OSError about a file outside the cache.
    """
    folder = Path(cache_dir).expanduser().resolve() / name
    try:
        if (damage := find_damage(folder)) is not None:
            _yield_to_rank_0()
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock"), mode=0o666):
                if (damage := find_damage(folder)) is not None:
                    if damage:
                        log.warning("%s: %s; creating the %s again", folder, damage, contents)
                    _make(folder, fill, contents)
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = (
            f"is {cache_dir}, which cannot store the {contents}: {reason}; set another folder, here or in FOUNDRY_CACHE"
        )
        raise ConfigError(Violation("data.cache_dir", message)) from error
    return folder


def _yield_to_rank_0() -> None:
    """Delay ranks other than 0, so that rank 0, which shows progress in terminal and log, creates the folder."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        time.sleep(_HEAD_START_SECONDS)


def _make(folder: Path, fill: Callable[[Path], tuple[str, ...]], contents: str) -> None:
    """Create the folder; the caller holds the lock.

    Raises:
        ConfigError: `fill` cannot read a file outside of the cache.
        OSError: the cache cannot be written.
    """
    sweep_temporaries(folder.parent)
    temporary = temporary_for(folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        lock(temporary, stack)  # marks the folder as in use for `sweep_temporaries`
        try:
            names = fill(temporary)
        except OSError as error:
            if _is_about(folder.parent, error):
                raise
            source = "" if error.filename is None else f"{error.filename}: "
            reason = f"{source}{error.strerror or error}"
            message = f"the {contents} cannot be created: {reason}; check the source of the data"
            raise ConfigError(Violation("data", message)) from error
        seal(temporary, names)
        temporary.chmod(0o755)
        (temporary / LOCK).unlink()
        publish(temporary, folder)


def _is_about(folder: Path, error: OSError) -> bool:
    """Return True if an error concerns a file in the folder, or names no file and can only occur while writing."""
    if error.filename is None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
    return Path(os.fsdecode(error.filename)).is_relative_to(folder)


def seal(folder: Path, names: tuple[str, ...]) -> None:
    """Write a manifest with the size and checksum of each file, and sync all files to disk."""
    files = {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": _checksum(folder / name)} for name in names}
    (folder / _MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
    for path in (*(folder / name for name in (*names, _MANIFEST)), folder):
        sync_path(path)


def find_damage(folder: Path) -> str | None:
    """Return a description of the damage to a sealed folder, "" if the folder does not exist, or None if it is intact.

    File sizes are always compared, and checksums too for folders up to 256 MiB. Checksums of larger folders, which take
    as long as reading the files from disk, are compared if the last comparison is a day old, or if inode, size, mtime
    or ctime of a file (programs cannot set the ctime) has changed since then.
    """
    try:
        files = json.loads(read_text(folder / _MANIFEST))["files"]
        stats = {name: (folder / name).stat() for name in files}
        for name, entry in files.items():
            if stats[name].st_size != entry["bytes"]:
                return f"{name} has {stats[name].st_size} bytes, not {entry['bytes']}"
        stamp = {name: [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats.items()}
        is_large = sum(s.st_size for s in stats.values()) > _ALWAYS_BYTES
        if is_large and _is_stamped(folder, stamp):
            return None
        for name, entry in files.items():
            if _checksum(folder / name) != entry["xxh3_128"]:
                return f"{name} has changed since it was written"
        if is_large:
            _stamp(folder, stamp)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing" if folder.is_dir() else ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{_MANIFEST} is damaged"
    return None


def temporary_for(folder: Path) -> Path:
    """Create a temporary folder next to `folder`, to be filled and then renamed by `publish`."""
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))


def publish(temporary: Path, folder: Path) -> None:
    """Rename a sealed temporary folder to its final name, and replace a damaged folder of that name.

    Processes that have files of the damaged folder open can continue to read them.
    """
    if folder.is_dir() and find_damage(folder):
        damaged_folder = temporary.with_name(f"{temporary.name}.damaged")
        folder.rename(damaged_folder)
        shutil.rmtree(damaged_folder, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError as error:
        # Locks do not work on some network file systems, so another machine may have published the folder first.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    sync_path(folder.parent)


def sweep_temporaries(parent: Path) -> None:
    """Remove temporary folders of processes that have ended.

    If it is unknown whether a process has ended, for example because it ran on another machine, its folder is removed a
    week after the last write to the folder.
    """
    for temporary in parent.iterdir():
        if not _TEMPORARY.fullmatch(temporary.name) or temporary.is_symlink():
            continue
        is_locked = is_held(temporary)
        if is_locked is False or (is_locked is None and time.time() - _last_write_time(temporary) > _ABANDONED_SECONDS):
            shutil.rmtree(temporary, ignore_errors=True)


def _last_write_time(folder: Path) -> float:
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # the folder is being published or removed
        return time.time()


def _is_stamped(folder: Path, stamp: dict[str, Any]) -> bool:
    try:
        record = json.loads(read_text(folder / _VERIFIED))
        return bool(record["files"] == stamp and 0 <= time.time() - record["time"] < _STAMP_SECONDS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _stamp(folder: Path, stamp: dict[str, Any]) -> None:
    """Record a successful verification; this fails silently in another user's folder, which is verified each time."""
    try:
        write_atomically(folder / _VERIFIED, json.dumps({"time": time.time(), "files": stamp}))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
