"""A later version may add settings with `since`: at their default value they do not change a config's hash."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.composition import configure

from foundry.config.record.frozen import hash_config
from foundry.config.schemas.hparams import BatchRamp, HParams
from foundry.config.schemas.root import Config
from foundry.config.setting import group, setting


@dataclass(frozen=True, kw_only=True)
class LaterRamp(BatchRamp):
    shape: str = setting("linear", "a setting of a later version", since="7.0")


@dataclass(frozen=True, kw_only=True)
class LaterHParams(HParams):
    batch_ramp: LaterRamp = field(default_factory=LaterRamp)
    clip_value: float | None = setting(None, "a setting of a later version", since="7.0")
    names: dict[str, Any] = setting(dict, "a setting of a later version", since="7.0")


@dataclass(frozen=True, kw_only=True)
class Audit:
    level: int = setting(1, "a setting of a later group")


@dataclass(frozen=True, kw_only=True)
class LaterConfig(Config):
    audit: Audit = group(Audit, since="7.0")


@dataclass(frozen=True, kw_only=True)
class HashedHParams(HParams):
    clip_value: float | None = setting(None, "a setting that the hash has at its default")


def values(node):
    """Return the fields of a dataclass as keyword arguments for a subclass."""
    return dict(vars(node))


def later(config, **settings):
    """Convert a config to the schema of a later version with more settings."""
    hparams = LaterHParams(**{**values(config.hparams), "batch_ramp": LaterRamp(**values(config.hparams.batch_ramp))})
    return LaterConfig(**{**values(config), "hparams": replace(hparams, **settings)})


def test_new_settings_at_their_default_do_not_change_the_hash():
    config = configure()
    assert hash_config(later(config)) == hash_config(config)


@pytest.mark.parametrize(
    "settings", [{"clip_value": 1.0}, {"names": {"a": 1}}, {"batch_ramp": LaterRamp(shape="steps")}, {"lr": 2.0}]
)
def test_non_default_values_change_the_hash(settings):
    config = configure()
    assert hash_config(later(config, **settings)) != hash_config(config)


def test_non_default_value_in_a_new_group_changes_the_hash():
    config = configure()
    assert hash_config(replace(later(config), audit=Audit(level=2))) != hash_config(config)


def test_settings_without_since_are_hashed_even_at_their_default():
    config = configure()
    assert hash_config(replace(config, hparams=HashedHParams(**values(config.hparams)))) != hash_config(config)


def test_explicit_ramp_samples_change_the_hash():
    ramp = ("hparams.batch_ramp.start=256", "hparams.batch_ramp.increment=64", "hparams.train_samples=1M")
    given = configure(*ramp[:2], "hparams.batch_ramp.every_samples=1000", "hparams.global_batch_size=512")
    other = configure(*ramp[:2], "hparams.batch_ramp.every_samples=1001", "hparams.global_batch_size=512")
    assert hash_config(given) != hash_config(other)


def test_setting_with_since_rejects_an_interpolated_default():
    with pytest.raises(ValueError, match=r"since=7.0 needs a default without interpolation, not \$\{hparams.lr\}"):
        setting("${hparams.lr}", "a setting of a later version", since="7.0")
