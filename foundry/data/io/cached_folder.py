"""Folders of the cache: made once, and shared by every rank and run."""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock

from foundry.core.errors import ConfigError, Violation
from foundry.data.io.sealed_folder import find_damage, publish, seal, sweep_temporaries, temporary_for
from foundry.run_dir.lock import LOCK, lock

_HEAD_START_SECONDS = 0.5
log = logging.getLogger(__name__)


def cached_folder(cache_dir: str, name: str, fill: Callable[[Path], tuple[str, ...]], *, what: str = "tokens") -> Path:
    """A folder of the cache, made where there is none: whole and on the disk, or not at all.

    Any number of processes may ask at once: one makes it, the others wait for it.

    Args:
        cache_dir: the cache's parent folder.
        name: of the folder, which says all that its content depends on: 32 hexadecimal digits.
        fill: writes the files of the folder that it is given; their names.
        what: it holds, for messages.

    Raises:
        ConfigError: the cache cannot be written; or what `fill` raises.
    """
    folder = Path(cache_dir).expanduser().resolve() / name
    try:
        if (damage := find_damage(folder)) is not None:
            _give_way()
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock"), mode=0o666):
                if (damage := find_damage(folder)) is not None:
                    if damage:
                        log.warning("%s: %s; the %s are made again", folder, damage, what)
                    _publish(folder, fill)
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"is {cache_dir}, where {what} cannot be kept: {reason}; set another, here or in FOUNDRY_CACHE"
        raise ConfigError(Violation("data.cache_dir", message)) from error
    return folder


def _give_way() -> None:
    """Where ranks come together, let rank 0 make it, whose terminal and log say how far it has got."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        time.sleep(_HEAD_START_SECONDS)


def _publish(folder: Path, fill: Callable[[Path], tuple[str, ...]]) -> None:
    """Make the folder; the lock is held."""
    sweep_temporaries(folder.parent)
    temporary = temporary_for(folder)
    with ExitStack() as held:
        held.callback(shutil.rmtree, temporary, ignore_errors=True)
        lock(temporary, held)  # says to others that somebody is at work
        seal(temporary, fill(temporary))
        temporary.chmod(0o755)
        (temporary / LOCK).unlink()
        publish(temporary, folder)
