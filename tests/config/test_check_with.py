"""Checks of a part with the rest of the run, which stand in its schema."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from support.composition import compose, configure

from foundry.config.checks.rules import rules
from foundry.config.environment import Launch, detect
from foundry.core.errors import ConfigError, Violation


@dataclass(frozen=True)
class Own:
    """A part that knows the largest learning rate and number of ranks."""

    key: str

    def check_with(self, run, launch) -> Iterator[Violation]:
        if run.hparams.lr > 0.1 and launch.world_size > 1:
            yield Violation(self.key, f"learns at most at 0.1, not at {run.hparams.lr:g}")


def violations(config, nproc_per_node):
    launch = Launch(detect(), 1, replace(config.distributed, nproc_per_node=nproc_per_node))
    return [str(found) for rule in rules(config) for found in rule(config, launch)]


def test_every_group_is_checked_with_the_run_and_its_launch():
    config = configure("hparams.lr=0.5")
    own = replace(config, model=Own("model"), data=Own("data"), objective={"_target_": "own.Loss"})
    lines = [line for line in violations(own, 2) if "learns at most" in line]
    assert lines == ["model: learns at most at 0.1, not at 0.5", "data: learns at most at 0.1, not at 0.5"]
    assert not [line for line in violations(own, 1) if "learns at most" in line]


def test_a_value_out_of_its_bounds_ends_only_the_checks_that_read_it():
    with pytest.raises(ConfigError) as error:
        compose("hparams.lr=-1", "scheduler.min_lr=1", "optimizer=muon", "peft=lora", "precision=pure_bf16")
    assert [found.key for found in error.value.violations] == ["hparams.lr", "optimizer", "precision"]
