"""Composition of foundry's config, as in a notebook."""

from contextlib import nullcontext
from functools import cache

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

CHOICES = Choices()
"""Cache of foundry's option files, which no test changes."""


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


@cache
def configure(*overrides: str) -> Config:
    """Compose a typed config, as for `run`; cached, because it is frozen."""
    return to_config(compose(*overrides))


def allowed_by_hydra():
    """Return a context that lets Hydra 1.4 instantiate foundry's sweepers and launchers, as during a command."""
    return nullcontext() if IS_1_3 else hydra.utils.execution_whitelist(["foundry.*"])
