"""The folder that a command was started in, and paths relative to it."""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.sources import is_url, listed_paths
from foundry.core.errors import ConfigError, Violation, as_text

_FOLDERS = ("data.cache_dir",)
_WRITTEN = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.launcher.submitit_folder",
    "checkpoint.resume",
    *_FOLDERS,
)
"""Settings that name a folder where foundry writes or locks files."""
_SQLITE = "sqlite:///"
_DEFAULT_URI = f"{_SQLITE}mlflow.db"
_NO_PATHS = ("auto", "never")


def check_start_dir() -> None:
    """Check that the current folder still exists, since relative paths, Hydra and torch need it.

    Raises:
        ConfigError: if the folder was deleted, or its file system is gone.
    """
    try:
        Path.cwd()
    except OSError as error:
        message = (
            f"cannot be read ({error.strerror}): it was deleted, moved or unmounted. Change to an existing folder with "
            "cd and start again"
        )
        raise ConfigError(Violation("current folder", message)) from None


def check_folders(composed: DictConfig) -> Iterator[Violation]:
    """Yield an error for each folder to write or lock that is a URL. As a path, `s3://bucket/run` is a folder `s3:`."""
    for key in _WRITTEN:
        value = _value(composed, key)
        if isinstance(value, str) and "://" in value:
            yield Violation(key, f"is {as_text(value)}, a URL; give a folder on this machine")


def anchor_paths(composed: DictConfig) -> None:
    """Make the paths of a configuration absolute if its job will change into the run directory.

    A job does so if `hydra.job.chdir=true`. Every setting of foundry's schemas that names a file or folder becomes
    absolute. In the user's own parts, it is unknown which values are paths.
    """
    if not OmegaConf.select(composed, "hydra.job.chdir"):
        return
    start = Path(str(composed.hydra.runtime.cwd))
    for key in _path_keys(composed):
        if (value := _value(composed, key)) is not None:
            paths = [path if is_url(path) else str(start / Path(path).expanduser()) for path in listed_paths(value)]
            OmegaConf.update(composed, key, paths if isinstance(value, list) else paths[0])
    if (resume := _value(composed, "checkpoint.resume")) not in (None, *_NO_PATHS):
        OmegaConf.update(composed, "checkpoint.resume", str(start / Path(str(resume)).expanduser()))
    uri = str(_value(composed, "tracking.uri") or "") or os.environ.get("MLFLOW_TRACKING_URI") or _DEFAULT_URI
    if uri.startswith(_SQLITE) and len(uri) > len(_SQLITE):
        OmegaConf.update(composed, "tracking.uri", f"{_SQLITE}{start / uri.removeprefix(_SQLITE)}")


def _path_keys(composed: DictConfig) -> Iterator[str]:
    for group in composed:
        if group != "hydra":
            yield from _path_keys_of(composed._get_node(group), str(group))


def _path_keys_of(node: Any, path: str) -> Iterator[str]:
    schema = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    for item in fields(schema) if is_dataclass(schema) else ():
        key = f"{path}.{item.name}"
        if item.metadata.get("path") or key in _FOLDERS:
            yield key
        else:
            yield from _path_keys_of(node._get_node(item.name), key)


def _value(composed: DictConfig, key: str) -> str | list[str] | None:
    try:
        value = OmegaConf.select(composed, key)
    except OmegaConfBaseException:  # e.g. an interpolation of the job number, which is not known yet
        return None
    if isinstance(value, ListConfig):
        return [str(item) for item in value]
    return None if value is None else str(value)
