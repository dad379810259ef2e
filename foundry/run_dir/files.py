"""Reading and writing files in a directory that somebody else may have filled.

A run directory is copied, shared and downloaded. So nothing in it is trusted to be what its name says: a symbolic link
is neither read nor written through, and a pipe or a device is never waited on.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MAX_TEXT_BYTES = 2**26
"""No small file of a run directory is larger; one that is was not written by foundry."""

_FLAGS = {
    "r": os.O_RDONLY,
    "a": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "w": os.O_WRONLY | os.O_CREAT,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnsafeFileError(OSError):
    """A path is not the regular file, or the folder, that it should be."""

    def __init__(self, path: Path, kind: str, wanted: str = "a regular file") -> None:
        super().__init__(errno.EINVAL, f"is {kind}, not {wanted}; remove it", str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_regular(path: Path, mode: str = "r", *, permissions: int = 0o666, **options: Any) -> IO[Any]:
    """Open a regular file, as `Path.open` does, but never a symbolic link, a pipe, a device or a folder.

    Args:
        path: the file; links among its parent folders are followed.
        mode: "r", "w", "a" or "x", with "b" for bytes.
        permissions: of a file that is created, before the umask.
        options: `encoding`, `newline` and `buffering`, as for `open`; text is UTF-8 by default.

    Raises:
        UnsafeFileError: it is there and not a regular file.
        OSError: it cannot be opened, as by `Path.open`.
    """
    flags = _FLAGS[mode.replace("b", "")] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, permissions)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise _unsafe(path, os.lstat(path).st_mode) from None
        raise
    try:
        found = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(found):
            raise _unsafe(path, found)
        os.set_blocking(descriptor, True)
        if mode.startswith("w"):
            os.truncate(descriptor, 0)  # not O_TRUNC: it would come before the check
    except BaseException:
        os.close(descriptor)
        raise
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    return os.fdopen(descriptor, mode.replace("x", "w"), **options)


def require_regular(path: Path) -> Path:
    """Return the path of a file that a user names, if it can be read without waiting for another program.

    Symbolic links are followed: data may be kept on another disk.

    Raises:
        UnsafeFileError: it is a pipe, a device, a socket or a folder.
        OSError: it is missing.
    """
    if not stat.S_ISREG(mode := path.stat().st_mode):
        raise _unsafe(path, mode)
    return path


def read_bytes(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        UnsafeFileError: it is not a regular file, or larger than `max_bytes`.
        OSError: it is missing or cannot be read.
    """
    with open_regular(path, "rb") as file:
        content: bytes = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(path, f"larger than {max_bytes} bytes", "a small file")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        UnicodeDecodeError: it is no UTF-8; as the errors of JSON and of YAML, a ValueError or not an OSError.
        UnsafeFileError: it is not a regular file, or larger than `max_bytes`.
        OSError: it is missing or cannot be read.
    """
    return read_bytes(path, max_bytes=max_bytes).decode("utf-8")


def read_tail(path: Path, *, num_bytes: int = 4096) -> str:
    """The end of a regular file as text, whatever it holds; empty where there is none that can be read."""
    try:
        with open_regular(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - num_bytes, 0))
            content: bytes = file.read(num_bytes)
    except (OSError, ValueError):
        return ""
    return content.decode(errors="replace")


def in_hub_cache(path: Path) -> Path:
    """The file itself where a path lies in a folder of the Hugging Face cache, whose files are links to `blobs/`.

    A link that leads anywhere else stays the link that it is.
    """
    if path.is_symlink():
        real, cache = path.resolve(), path.parent.resolve().parents
        if len(cache) > 1 and cache[0].name == "snapshots" and real.parent == cache[1] / "blobs":
            return real
    return path


@contextmanager
def replaced_atomically(path: Path, *, durable: bool = False, permissions: int = 0o666) -> Iterator[IO[bytes]]:
    """A new file to write bytes into, which replaces `path` in one step when the body ends without an error.

    A reader sees the old file or the new one, never a part. Where `path` is a symbolic link, the link is replaced.

    Args:
        path: the file.
        durable: also wait until the content is on the disk.
        permissions: of the file, before the umask.

    Raises:
        UnsafeFileError: there is a folder by this name.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process with the same number, which was killed
    try:
        with open_regular(partial, "xb", permissions=permissions) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        try:
            partial.replace(path)
        except IsADirectoryError:
            raise UnsafeFileError(path, "a folder") from None
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str, *, durable: bool = False, permissions: int = 0o666) -> None:
    """Replace `path` by `text` in one step; as `replaced_atomically`."""
    with replaced_atomically(path, durable=durable, permissions=permissions) as file:
        file.write(text.encode())


def sync_path(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, *, parents: bool = False) -> Path:
    """Make a folder where it is not there yet.

    Args:
        path: of the folder.
        parents: make those as well. Not for records of a run: a run directory that was just deleted or moved would come
            back with this folder alone in it.

    Raises:
        UnsafeFileError: there is something else by this name, a symbolic link included.
        FileNotFoundError: the parent is not there.
    """
    path.mkdir(parents=parents, exist_ok=True)
    if path.is_symlink():
        raise UnsafeFileError(path, "a symbolic link", "a folder")
    return path


def inside(folder: Path, name: str) -> Path:
    """The path of something in a folder, from a name that somebody else may have written.

    Args:
        folder: where it must lie.
        name: relative, with subfolders at most.

    Raises:
        ValueError: the name leads out of the folder, by itself or by a symbolic link.
    """
    if "\0" not in name and not Path(name).is_absolute():
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    raise ValueError(f"{name!r} leads out of {folder}")


def _unsafe(path: Path, mode: int) -> UnsafeFileError:
    return UnsafeFileError(path, next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else"))
