"""Restoring of a run directory, or of parts of it, from a store; every byte is verified before it is used."""

import errno
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from foundry.run_dir.checkpoints import BEST, LATEST, MANIFEST, removed_path, step_name
from foundry.run_dir.files import inside, make_folder, open_regular, read_bytes, replaced_atomically, sync_path
from foundry.run_dir.log import prepend_to_log
from foundry.run_dir.marker import MARK
from foundry.run_dir.mirror.copying import is_small_file
from foundry.run_dir.mirror.snapshot import DamagedMirrorError, Part, Snapshot
from foundry.run_dir.mirror.store import MissingObjectError, Store, TooLargeError
from foundry.run_dir.names import CHECKPOINTS, HYDRA, LOG, MLFLOW_PARENT, OUTPUT, SUBMISSION, TRIAL

_CHUNK_BYTES = 2**22
_OF_THE_LAUNCH = (MARK, HYDRA, OUTPUT, SUBMISSION, TRIAL, MLFLOW_PARENT)
"""Files that each launch writes anew; a restored file does not replace them."""

_NO_PLACE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG)


def fetch_file(store: Store, part: Part, file: Path) -> None:
    """Copy an object to a new file, verify it, and wait until it is on disk.

    Raises:
        DamagedMirrorError: the object is missing, or has another size or checksum.
        StoreError: the store cannot be read.
    """
    try:
        store.download(part.object, file)
    except MissingObjectError:
        raise DamagedMirrorError(f"{part.object} is missing") from None
    digest = xxhash.xxh3_128()
    with open_regular(file, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
        size = stream.tell()
    _require(part, size, digest.hexdigest())
    sync_path(file)


def partial_folder(run_dir: Path, step: int) -> Path:
    """Return the temporary folder of a checkpoint that is being fetched; a save would delete it as unfinished."""
    return run_dir / CHECKPOINTS / f".{step_name(step)}.partial"


def begin_checkpoint(run_dir: Path, step: int) -> Path:
    """Create an empty temporary folder for a checkpoint, and return it."""
    folder = partial_folder(run_dir, step)
    make_folder(folder.parent, parents=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def end_checkpoint(run_dir: Path, step: int) -> Path:
    """Give a checkpoint its name after all its files are on disk, and return its folder.

    If the temporary folder contains a manifest, it replaces an existing folder of this step. Otherwise its files are
    added to that folder.
    """
    folder = partial_folder(run_dir, step)
    sync_path(folder)
    final = folder.with_name(step_name(step))
    if not (folder / MANIFEST).exists():
        for file in folder.iterdir():
            file.replace(final / file.name)
        folder.rmdir()
        sync_path(final)
        return final
    removed = removed_path(final)
    if final.exists():
        shutil.rmtree(removed, ignore_errors=True)
        final.rename(removed)
    folder.rename(final)
    sync_path(final.parent)
    shutil.rmtree(removed, ignore_errors=True)
    return final


def fetch_checkpoint(store: Store, snapshot: Snapshot, run_dir: Path) -> Path:
    """Copy a checkpoint into a local copy of a run, unless it is there, and return its folder.

    A folder of the same step with another manifest is replaced.

    Raises:
        DamagedMirrorError: an object is missing or damaged; nothing is left behind.
        StoreError: the store cannot be read.
    """
    assert snapshot.step is not None
    folder = run_dir / CHECKPOINTS / step_name(snapshot.step)
    if folder.is_dir():
        if _has_manifest(folder, snapshot):
            return folder
        shutil.rmtree(folder)
    partial = begin_checkpoint(run_dir, snapshot.step)
    try:
        for name, part in snapshot.checkpoint.items():
            fetch_file(store, part, inside(partial, name))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return end_checkpoint(run_dir, snapshot.step)


def _has_manifest(folder: Path, snapshot: Snapshot) -> bool:
    part = snapshot.checkpoint.get(MANIFEST)
    try:
        return part is not None and xxhash.xxh3_128_hexdigest(read_bytes(folder / MANIFEST)) == part.checksum
    except OSError:
        return False


def fetch_small_files(
    store: Store, choices: Sequence[Mapping[str, Sequence[Part]]], run_dir: Path, *, is_launch: bool = False
) -> Mapping[str, str]:
    """Copy the small files of a run into its directory, and replace files of the same name.

    Args:
        store: the store.
        choices: parts of the files by name. The first has all files; the next is used for a file that is damaged.
        run_dir: the run directory.
        is_launch: a launch has begun in the directory: keep the files that it has written, and append its log to the
            log from the store.

    Returns:
        The reason for each file that is damaged in every choice, or whose path is occupied, by name.

    Raises:
        StoreError: the store cannot be read; then no file is replaced.
    """
    staging, damaged = run_dir / ".mirror.partial", dict[str, str]()
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        names = [name for name in sorted(choices[0]) if is_small_file(name)] if choices else []
        for name in names:
            for parts in (files[name] for files in choices if name in files):
                try:
                    _fetch_parts(store, parts, staging, name)
                    damaged.pop(name, None)
                    break
                except DamagedMirrorError as error:
                    damaged[name] = str(error)
        for name in names:
            if name not in damaged:
                try:
                    with _placed():
                        _put(staging / name, run_dir, name, is_launch=is_launch)
                except DamagedMirrorError as error:
                    damaged[name] = str(error)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return damaged


def _fetch_parts(store: Store, parts: Sequence[Part], folder: Path, name: str) -> None:
    with _placed():
        file = inside(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = open_regular(file, "wb")
    with stream:
        for part in parts:
            stream.write(_read(store, part))


@contextmanager
def _placed() -> Iterator[None]:
    """Convert the error of a file whose path is occupied, too long, or leads out of the directory through a link.

    Raises:
        DamagedMirrorError: the file has no place.
    """
    try:
        yield
    except ValueError as error:
        raise DamagedMirrorError(str(error)) from None
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        raise DamagedMirrorError(str(error)) from None


def _put(source: Path, run_dir: Path, name: str, *, is_launch: bool) -> None:
    """Move a file that was fetched to its place in the run directory."""
    target = inside(run_dir, name)
    if is_launch and name.partition("/")[0] in _OF_THE_LAUNCH and target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_launch and name == LOG:
        prepend_to_log(target, source.read_bytes())
        return
    with replaced_atomically(target, durable=True) as output, source.open("rb") as stream:
        shutil.copyfileobj(stream, output)


def restore_links(run_dir: Path, latest: int, best: int | None) -> None:
    """Point the links `latest` and `best` of a run directory to the checkpoints that were fetched."""
    for name, step in ((LATEST, latest), (BEST, best)):
        if step is not None and (run_dir / CHECKPOINTS / step_name(step)).is_dir():
            path = run_dir / CHECKPOINTS / name
            with suppress(FileNotFoundError):
                path.unlink()
            path.symlink_to(step_name(step))


def _read(store: Store, part: Part) -> bytes:
    try:
        content = store.read(part.object)
    except MissingObjectError:
        raise DamagedMirrorError(f"{part.object} is missing") from None
    except TooLargeError as error:
        raise DamagedMirrorError(str(error)) from None
    _require(part, len(content), xxhash.xxh3_128_hexdigest(content))
    return content


def _require(part: Part, size: int, checksum: str) -> None:
    if size != part.bytes:
        raise DamagedMirrorError(f"{part.object} has {size} bytes, not {part.bytes}")
    if checksum != part.checksum:
        raise DamagedMirrorError(f"{part.object} does not match its checksum")
