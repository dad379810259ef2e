"""Reading and writing files in a directory whose contents are not trusted.

Run directories are copied, shared and downloaded, so a file may be of another kind than its name suggests. These
functions do not read or write through symlinks, and never block on a pipe or a device.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MAX_TEXT_BYTES = 2**26
"""Size limit of the small files of a run directory; a larger file was not written by foundry."""

_FLAGS = {
    "r": os.O_RDONLY,
    "a": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "w": os.O_WRONLY | os.O_CREAT,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnsafeFileError(OSError):
    """A path is not the expected regular file or folder, or the file is too large."""

    def __init__(self, path: Path, kind: str, expected: str = "a regular file") -> None:
        super().__init__(errno.EINVAL, f"is {kind}, not {expected}; remove it", str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_regular(path: Path, mode: str = "r", *, permissions: int = 0o666, **options: Any) -> IO[Any]:
    """Open a regular file like `Path.open`, but reject symlinks, pipes, devices and folders.

    Args:
        path: the file; symlinks among its parent folders are followed.
        mode: "r", "w", "a" or "x", with "b" for bytes.
        permissions: mode bits of a created file, before the umask.
        options: `encoding`, `newline` and `buffering`, as for `open`; the default encoding of text is UTF-8.

    Raises:
        UnsafeFileError: the path exists and is not a regular file.
        OSError: the file cannot be opened, as in `Path.open`.
    """
    flags = _FLAGS[mode.replace("b", "")] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, permissions)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise _unsafe(path, os.lstat(path).st_mode) from None
        raise
    try:
        mode_bits = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode_bits):
            raise _unsafe(path, mode_bits)
        os.set_blocking(descriptor, True)
        if mode.startswith("w"):
            os.truncate(descriptor, 0)  # not O_TRUNC, which would truncate before S_ISREG is checked
    except BaseException:
        os.close(descriptor)
        raise
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    return os.fdopen(descriptor, mode.replace("x", "w"), **options)


def require_regular(path: Path) -> Path:
    """Return `path`, which the user chose, after a check that it is a regular file, so that reads cannot block.

    Symlinks are followed, because data may be stored on another disk.

    Raises:
        UnsafeFileError: the path is a pipe, a device, a socket or a folder.
        OSError: the file does not exist.
    """
    if not stat.S_ISREG(mode := path.stat().st_mode):
        raise _unsafe(path, mode)
    return path


def read_bytes(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        UnsafeFileError: the path is not a regular file, or the file is larger than `max_bytes`.
        OSError: the file does not exist or cannot be read.
    """
    with open_regular(path, "rb") as file:
        content: bytes = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(path, f"larger than {max_bytes} bytes", "a small file")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        UnicodeDecodeError: the file is not valid UTF-8; a ValueError, like the errors of JSON and YAML parsers.
        UnsafeFileError: the path is not a regular file, or the file is larger than `max_bytes`.
        OSError: the file does not exist or cannot be read.
    """
    return read_bytes(path, max_bytes=max_bytes).decode("utf-8")


def read_tail(path: Path, *, num_bytes: int = 4096) -> str:
    """Return the last `num_bytes` of a regular file as text, invalid ones replaced; "" if the file cannot be read."""
    try:
        with open_regular(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - num_bytes, 0))
            content: bytes = file.read(num_bytes)
    except (OSError, ValueError):
        return ""
    return content.decode(errors="replace")


def in_hub_cache(path: Path) -> Path:
    """Resolve a symlink of the Hugging Face cache, whose snapshot files are symlinks to `blobs/`.

    Any other path is returned unchanged, including symlinks to other places.
    """
    if path.is_symlink():
        real, cache = path.resolve(), path.parent.resolve().parents
        if len(cache) > 1 and cache[0].name == "snapshots" and real.parent == cache[1] / "blobs":
            return real
    return path


@contextmanager
def replaced_atomically(path: Path, *, durable: bool = False, permissions: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a new binary file that replaces `path` atomically if the `with` block ends without an error.

    Readers see the old file or the new one, never a part. If `path` is a symlink, the symlink itself is replaced.

    Args:
        path: the file to replace.
        durable: also wait until the content is on disk.
        permissions: mode bits of the file, before the umask.

    Raises:
        UnsafeFileError: `path` is a folder.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # left by a killed process with the same process id
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
    """Replace the content of `path` by `text` atomically; see `replaced_atomically`."""
    with replaced_atomically(path, durable=durable, permissions=permissions) as file:
        file.write(text.encode())


def sync_path(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, *, parents: bool = False) -> Path:
    """Create a folder if it does not exist.

    Args:
        path: path of the folder.
        parents: create missing parents. Must be False for records of a run: True would recreate a run directory that
            was just deleted or moved, with only this folder in it.

    Raises:
        UnsafeFileError: the path is a symbolic link, or exists and is not a folder.
        FileNotFoundError: the parent does not exist.
    """
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except FileExistsError:
        raise _unsafe(path, os.lstat(path).st_mode, "a folder") from None
    if path.is_symlink():
        raise UnsafeFileError(path, "a symbolic link", "a folder")
    return path


def inside(folder: Path, name: str) -> Path:
    """Return the path of an entry of a folder, given a name from an untrusted source.

    Args:
        folder: the folder that must contain the path.
        name: relative path; it may contain subfolders.

    Raises:
        ValueError: the name is absolute, contains a null character, or leads out of the folder, directly or through a
            symlink.
    """
    if "\0" not in name and not Path(name).is_absolute():
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    raise ValueError(f"{name!r} leads out of {folder}")


def _unsafe(path: Path, mode: int, expected: str = "a regular file") -> UnsafeFileError:
    return UnsafeFileError(path, next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a special file"), expected)
