"""Composition of foundry's config, as in a notebook."""

import hashlib
import os
import pickle
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import hydra
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from foundry.config.composition.choices import Choices
from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import IS_1_3, VERSION_BASE
from foundry.config.schemas.root import Config, to_config
from foundry.core.errors import ConfigError


class _SharedCompositions(dict):
    """Compositions in memory and, once a folder is set, in files that all processes of the tests share."""

    folder: Path | None = None

    def __contains__(self, key):
        if not super().__contains__(key) and self.folder is not None and self._path(key).exists():
            super().__setitem__(key, pickle.loads(self._path(key).read_bytes()))
        return super().__contains__(key)

    def __setitem__(self, key, composition):
        super().__setitem__(key, composition)
        if self.folder is not None:
            new = self._path(key).with_suffix(f".{os.getpid()}")
            new.write_bytes(pickle.dumps(composition))
            new.rename(self._path(key))

    def _path(self, key):
        return self.folder / hashlib.sha256(repr(key).encode()).hexdigest()


COMPOSITIONS = _SharedCompositions()
CHOICES = Choices(COMPOSITIONS)
"""Cache of foundry's option files, which no test changes."""


OWN_OPTIONS = ("--config-", "-cd", "-cp", "-cn", "hydra.searchpath")
"""Prefixes of arguments that add folders of options, which may differ between commands."""


def share_compositions(cache: Path) -> None:
    """Share the compositions of `CHOICES` with all processes of the tests; `cache` is their cache folder.

    The folder of compositions is beside the cache folder. Nothing is shared if it does not exist.
    """
    folder = cache.with_name("compositions")
    COMPOSITIONS.folder = folder if folder.is_dir() else None


def compose(*overrides: str) -> DictConfig:
    """Compose a DictConfig; skip the test if an optional package is missing, such as a simulator."""
    install()
    try:
        with CHOICES.used(), initialize_config_dir(config_dir(), **VERSION_BASE):
            return hydra_compose(CONFIG_NAME, list(overrides))
    except ConfigError as error:
        for violation in error.violations:
            if "which is not installed; pip install" in violation.message:
                pytest.skip(str(violation))
        raise


EQUAL_RATES = ("optimizer.groups.embeddings.lr_mult=1", "optimizer.groups.head.lr_mult=1")
"""Overrides of `optimizer=muon` for models without an embedding and a separate head."""


def configure(*overrides: str) -> Config:
    """Compose a typed config, as for `run`; cached for each FOUNDRY_CACHE, because it is frozen."""
    return _configure(overrides, os.environ.get("FOUNDRY_CACHE"))


@cache
def _configure(overrides: tuple[str, ...], cache_dir: str | None) -> Config:
    """Compose a config that contains the value of FOUNDRY_CACHE, `cache_dir`."""
    return to_config(compose(*overrides))


def forget_configs() -> None:
    """Let `configure` compose again."""
    _configure.cache_clear()


def allowed_by_hydra():
    """Return a context that lets Hydra 1.4 instantiate foundry's sweepers and launchers, as during a command."""
    return nullcontext() if IS_1_3 else hydra.utils.execution_whitelist(["foundry.*"])
