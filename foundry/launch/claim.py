"""Claims of directories for runs, plans and sweeps, with a rollback if the command is refused."""

import errno
import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.core.utils import run_job as hydra_run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, read_write

from foundry.config.composition.hydra_application import current_config, error_of
from foundry.config.environment import detect
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.files import UnsafeFileError, open_regular, replaced_atomically
from foundry.run_dir.lock import LOCK, is_held
from foundry.run_dir.marker import MARK, is_foundry_folder, mark
from foundry.run_dir.names import CONFIG, LOG, PLAN, STATUS, TOKENIZER
from foundry.run_dir.redact import one_line

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_TIME = "${now:"
_HYDRA_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")
_RUN_FILES = (LOCK, MARK, CONFIG, PLAN, TOKENIZER)


class Refused(BaseException):
    """Carries a config error through Hydra, which would print additional text for a task's exception."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Claim:
    """A directory that this process may write to.

    Attributes:
        folder: absolute path of the directory.
        created_folders: the directory and its parents that this process had to create, innermost first.
        contents: previous content of each file that the command may have written by the time it is refused, by path;
            None if the file did not exist.
    """

    folder: Path
    created_folders: tuple[Path, ...]
    contents: dict[Path, bytes | None]

    def release(self) -> None:
        """Remove the files and folders that this process created, and restore the files that Hydra replaced.

        If another process trains in the directory, nothing is removed or restored.
        """
        if is_held(self.folder):
            return
        for path, content in self.contents.items():
            with suppress(OSError):  # the user must see the refusal, not an error of the cleanup
                if content is None:
                    path.unlink(missing_ok=True)
                elif _content(path) != content:
                    with replaced_atomically(path) as file:
                        file.write(content)
        subfolders = {parent for path in self.contents for parent in path.parents if self.folder in parent.parents}
        for folder in (*sorted(subfolders, reverse=True), *self.created_folders):
            with suppress(OSError):  # a folder that is not empty stays
                folder.rmdir()


def check_free(path: str, key: str) -> Path:
    """Return the absolute directory of a run, plan or sweep that is about to begin or resume; writes nothing.

    Args:
        path: the directory as given by the user.
        key: config key of the directory.

    Raises:
        ConfigError: the path is empty, has control characters, is not a directory, cannot be read, or contains files
            that are not foundry's.
    """
    if not path:
        raise ConfigError(Violation(key, "is empty; set the path of a folder that is new, empty, or contains the run"))
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in path.replace("\0", "")):
        message = f"is {path!r}, which contains a line break or another control character; choose a path without them"
        raise ConfigError(Violation(key, message))
    folder = Path(os.path.abspath(path))  # noqa: PTH100 # does not resolve symlinks, like Hydra
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or folder.is_symlink():
            raise ConfigError(Violation(key, f"is {folder}, which is not a folder; choose another path")) from None
        return folder
    except (OSError, ValueError) as error:
        raise _directory_error(folder, key, error) from None
    if entries and not is_foundry_folder(folder):
        message = (
            f"is {folder}, which contains files that are not foundry's, such as {entries[0].name}; "
            "choose a folder that is new, empty, or contains the run"
        )
        raise ConfigError(Violation(key, message))
    return folder


def claim(path: str, key: str, *, output_subdir: str | None = None, log_name: str = LOG) -> Claim:
    """Mark a directory as foundry's, after creating it if it does not exist; refuse it if `check_free` does.

    Args:
        path: the directory as given by the user.
        key: config key of the directory.
        output_subdir: subfolder for Hydra's copy of the configuration; None if Hydra does not write it.
        log_name: name of the file that Hydra will log to.

    Raises:
        ConfigError: as in `check_free`; or the directory cannot be created or written to, or contains a symlink or a
            device in place of a file of foundry.
    """
    folder = check_free(path, key)
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    hydra_files = [] if output_subdir is None else [folder / output_subdir / name for name in _HYDRA_FILES]
    try:
        if output_subdir is not None and (folder / output_subdir).is_symlink():
            raise UnsafeFileError(folder / output_subdir, "a symbolic link", "a folder")
        contents = {path: _content(path) for path in hydra_files}
        run_files = {path: _content(path, max_bytes=0) for path in (folder / name for name in (*_RUN_FILES, log_name))}
        # Only missing files, because a run that is resumed keeps its existing files.
        new_claim = Claim(
            folder, tuple(missing), contents | {path: None for path, content in run_files.items() if content is None}
        )
    except OSError as error:
        raise _directory_error(folder, key, error) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark(folder)
    except (OSError, ValueError) as error:
        new_claim.release()
        raise _directory_error(folder, key, error) from None
    return new_claim


@contextmanager
def claim_or_release(path: str, key: str, *, output_subdir: str | None = None, log_name: str = LOG) -> Iterator[Claim]:
    """Claim a directory like `claim`; release it if the body raises `ConfigError` or `Refused` before a run has begun.

    Raises:
        ConfigError: as in `claim`.
    """
    new_claim = claim(path, key, output_subdir=output_subdir, log_name=log_name)
    status = new_claim.folder / STATUS
    had_status = status.exists()
    try:
        yield new_claim
    except (ConfigError, Refused):
        if had_status or not status.exists():
            new_claim.release()
        raise


def run_job(
    *, config: DictConfig, job_dir_key: str, job_subdir_key: str | None, hydra_context: HydraContext, **arguments: Any
) -> JobReturn:
    """Call Hydra's `run_job`; on rank 0, claim the directory before Hydra writes, and release it if the run is refused.

    Ranks above 0 use rank 0's directory.

    Raises:
        ConfigError: the directory cannot be used, or contains the time and the ranks are on several nodes.
    """
    if job_subdir_key is None:
        check_agreed("hydra.run.dir", str(config.hydra.run._get_node("dir")._value()))
    run = partial(
        hydra_run_job,
        config=config,
        job_dir_key=job_dir_key,
        job_subdir_key=job_subdir_key,
        hydra_context=hydra_context,
        **arguments,
    )
    if detect().rank > 0:
        with read_write(config.hydra):
            config.hydra.run.dir = os.curdir
        return run()
    path, key = _resolve_directory(config, job_dir_key, job_subdir_key)
    log_name = f"{config.hydra.job.name}.log"
    with claim_or_release(path, key, output_subdir=config.hydra.output_subdir, log_name=log_name) as new_claim:
        try:
            result = run()  # errors of the job are stored in the result, not raised
        except OSError as error:
            raise _directory_error(new_claim.folder, key, error) from error
    if isinstance(error_of(result), ConfigError) and not (new_claim.folder / STATUS).exists():
        new_claim.release()
    return result


def check_agreed(key: str, path: str) -> None:
    """Check that all nodes of a run compose the same run directory, and compose it again after a restart.

    In a step of Slurm any directory is allowed: its ranks start once, and rank 0's directory is used.

    Args:
        key: config key of the directory.
        path: the directory, with its interpolations.

    Raises:
        ConfigError: the directory contains the time, and the ranks are on several nodes.
    """
    environment = detect()
    if environment.num_nodes > 1 and environment.launcher != "slurm" and _TIME in path:
        message = f"is {path} but each of the {environment.num_nodes} nodes would insert its own time"
        raise ConfigError(Violation(key, f"{message}; set {key}=PATH, a folder that all nodes share"))


def _resolve_directory(config: DictConfig, job_dir_key: str, job_subdir_key: str | None) -> tuple[str, str]:
    """Return the directory of a run or of a sweep's job, and its config key."""
    with current_config(config):
        path = str(OmegaConf.select(config, job_dir_key))
        if job_subdir_key is None:
            return path, job_dir_key
        return str(Path(path, str(OmegaConf.select(config, job_subdir_key)))), job_subdir_key


def _content(path: Path, *, max_bytes: int | None = None) -> bytes | None:
    """Return up to `max_bytes` bytes of a file; None if it does not exist."""
    try:
        with open_regular(path, "rb") as file:
            content: bytes = file.read(-1 if max_bytes is None else max_bytes)
            return content
    except FileNotFoundError:
        return None


def describe_disk_error(error: BaseException) -> str | None:
    """Return a message for a full or read-only disk, for any file; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _DISK_ERRORS:
        return None
    subject = "the run" if error.filename is None else one_line(os.fsdecode(error.filename))
    remedy = "free some space, or choose a folder on another disk with hydra.run.dir or data.cache_dir"
    return f"{subject} cannot be written: {error.strerror}; {remedy}"


def _directory_error(folder: Path, key: str, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and not isinstance(error, UnsafeFileError) else str(error)
    return ConfigError(Violation(key, f"is {folder}, which cannot be used: {reason}; choose a writable folder"))
