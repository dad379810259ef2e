"""SHA-256 hashes of data files, cached so that large files are not read at each start and by each rank."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from foundry.run_dir.files import read_text, require_regular, write_atomically

_LARGE_BYTES = 2**26
"""Minimum total size for caching hashes; smaller sets of files are hashed at each call, in a tenth of a second."""

_SETTLED_NS = 2 * 10**9
"""Minimum age of a change before a hash is cached: a newer file may change again with the same timestamp."""

_Digests = dict[str, tuple[list[int], str]]
"""Stamp of the file status (see `_stamp`) and SHA-256 in hexadecimal, by path."""


def file_digests(files: Sequence[Path], cache_dir: str | None = None) -> list[bytes]:
    """Return the SHA-256 of each file's content.

    If the files have 64 MiB or more in total, the hashes are cached by path, inode, size, mtime and ctime (which
    programs cannot set). If several processes call this at once, one then reads the files and the others wait for it.

    Args:
        files: regular files.
        cache_dir: parent folder of the cache; None, or a folder that is not writable, disables caching.

    Raises:
        OSError: a file cannot be read.
    """
    stats = [require_regular(file).stat() for file in files]
    if cache_dir is None or sum(status.st_size for status in stats) < _LARGE_BYTES:
        return [bytes.fromhex(_hash(file)) for file in files]
    paths = [os.path.realpath(file) for file in files]
    name = hashlib.sha256("\0".join(paths).encode(errors="surrogateescape")).hexdigest()[:32]
    cache_file = Path(cache_dir).expanduser().resolve() / f"{name}.digests.json"
    stamps = [_stamp(status) for status in stats]
    digests = _read(cache_file)
    if not _has_all(digests, paths, stamps):
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(cache_file.with_suffix(".lock"), mode=0o666)
            lock.acquire()
        except (OSError, NotImplementedError):  # not reported here: writing the tokens to the cache reports the error
            return [bytes.fromhex(_hash(file)) for file in files]
        with lock:
            digests = _read(cache_file)
            if not _has_all(digests, paths, stamps):
                digests = {path: (stamp, _hash(file)) for path, stamp, file in zip(paths, stamps, files, strict=True)}
                _save(cache_file, digests)
    return [bytes.fromhex(digests[path][1]) for path in paths]


def _has_all(digests: _Digests, paths: Sequence[str], stamps: Sequence[list[int]]) -> bool:
    return all(path in digests and digests[path][0] == stamp for path, stamp in zip(paths, stamps, strict=True))


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _save(file: Path, digests: _Digests) -> None:
    """Save the hashes, unless a file has changed while it was read or was changed too recently."""
    newest_allowed = time.time_ns() - _SETTLED_NS
    for path, (stamp, _) in digests.items():
        if _stamp(Path(path).stat()) != stamp or stamp[-1] > newest_allowed:
            return
    try:
        write_atomically(file, json.dumps(digests))
    except OSError:  # not reported here: writing the tokens to the cache reports the error
        return


def _read(file: Path) -> _Digests:
    try:
        digests = json.loads(read_text(file))
        return {path: (list(stamp), bytes.fromhex(digest).hex()) for path, (stamp, digest) in digests.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
