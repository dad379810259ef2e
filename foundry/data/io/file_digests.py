"""SHA-256 of a corpus's files, kept in the cache: large ones are not read at each start, nor by each rank."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from foundry.run_dir.files import read_text, require_regular, write_atomically

_LARGE_BYTES = 2**26
"""What is smaller altogether is hashed whenever it is asked for: a tenth of a second."""

_SETTLED_NS = 2 * 10**9
"""A file that was changed so lately may change again within one tick of its clock."""

_Known = dict[str, tuple[list[int], str]]
"""By path: what tells a file's content from another, and its SHA-256 in hexadecimal."""


def file_digests(files: Sequence[Path], cache_dir: str | None = None) -> list[bytes]:
    """The SHA-256 of each file's content.

    Of a large corpus they are kept in the cache, by path, inode, size, and times of modification and of change, the
    last of which no program sets. Of processes that ask at once one reads the files, and the others wait for it.

    Args:
        files: regular files.
        cache_dir: the cache's parent folder; None, or one that cannot be written to: nothing is kept.

    Raises:
        OSError: a file cannot be read.
    """
    stats = [require_regular(file).stat() for file in files]
    if cache_dir is None or sum(status.st_size for status in stats) < _LARGE_BYTES:
        return [bytes.fromhex(_hash(file)) for file in files]
    paths = [os.path.realpath(file) for file in files]
    name = hashlib.sha256("\0".join(paths).encode(errors="surrogateescape")).hexdigest()[:32]
    kept = Path(cache_dir).expanduser().resolve() / f"{name}.digests.json"
    stamps = [_stamp(status) for status in stats]
    known = _read(kept)
    if not _knows_all(known, paths, stamps):
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(kept.with_suffix(".lock"), mode=0o666)
            lock.acquire()
        except (OSError, NotImplementedError):  # whoever writes tokens there says so
            return [bytes.fromhex(_hash(file)) for file in files]
        with lock:
            known = _read(kept)
            if not _knows_all(known, paths, stamps):
                known = {path: (stamp, _hash(file)) for path, stamp, file in zip(paths, stamps, files, strict=True)}
                _keep(kept, known)
    return [bytes.fromhex(known[path][1]) for path in paths]


def _knows_all(known: _Known, paths: Sequence[str], stamps: Sequence[list[int]]) -> bool:
    return all(path in known and known[path][0] == stamp for path, stamp in zip(paths, stamps, strict=True))


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _keep(file: Path, known: _Known) -> None:
    """Write down the digests of files that are still what they were before they were read, and have settled."""
    before = time.time_ns() - _SETTLED_NS
    for path, (stamp, _) in known.items():
        if _stamp(Path(path).stat()) != stamp or stamp[-1] > before:
            return
    try:
        write_atomically(file, json.dumps(known))
    except OSError:  # whoever writes tokens there says so
        return


def _read(file: Path) -> _Known:
    try:
        known = json.loads(read_text(file))
        return {path: (list(stamp), bytes.fromhex(digest).hex()) for path, (stamp, digest) in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
