"""Hostile targets in any group of an untrusted config are rejected."""

import random

import pytest
import yaml
from attacks import CANARY, SECRET, hydra_targets, places, spoilt, targets
from support.examples import examples

from foundry.config.composition.store import GROUPS
from foundry.config.record.frozen import load_config
from foundry.config.record.recorded import built_in_targets
from foundry.core.errors import ConfigError
from foundry.core.part_names import public_name


def test_load_config_rejects_hostile_targets_in_every_group(lm, tmp_path, monkeypatch):
    monkeypatch.setenv(CANARY, SECRET)
    canary, good = tmp_path / "canary", yaml.safe_load((lm / "config.yaml").read_text())
    own = {target for group in GROUPS for target in built_in_targets(group)} | set(hydra_targets(good))
    attempts = [(place, change) for name, attack in targets(canary).items() for place, change in places(attack, name)]
    assert len(attempts) >= 500
    for place, change in random.Random(0).sample(attempts, examples(len(attempts))):
        bad = spoilt(good, change)
        (lm / "config.yaml").write_text(yaml.safe_dump(bad))
        with pytest.raises(ConfigError) as refused:
            load_config(lm)
        message = str(refused.value)
        assert all("trust=true" in line for line in message.splitlines()), place
        assert message.count("\n") < 6, place
        foreign = {target for target in hydra_targets(bad) if public_name(target) not in own}
        assert all(target in message for target in foreign), place
        assert SECRET not in message, place
        assert not canary.exists(), place
