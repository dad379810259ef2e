"""Schemas check their settings against the rest of the run in their method `check_with`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from support.composition import compose, configure

from foundry.config.checks.rules import rules
from foundry.config.environment import Launch, detect
from foundry.core.errors import ConfigError, Violation


@dataclass(frozen=True)
class Own:
    """A part with a limit on the learning rate in multi-rank runs."""

    key: str

    def check_with(self, run, launch) -> Iterator[Violation]:
        if run.hparams.lr > 0.1 and launch.world_size > 1:
            yield Violation(self.key, f"learns at most at 0.1, not at {run.hparams.lr:g}")


def violations(config, nproc_per_node):
    launch = Launch(detect(), 1, replace(config.distributed, nproc_per_node=nproc_per_node))
    return [str(found) for rule in rules(config) for found in rule(config, launch)]


def test_check_with_of_every_group_gets_the_run_and_the_launch():
    config = configure("hparams.lr=0.5")
    own = replace(config, model=Own("model"), data=Own("data"), objective={"_target_": "own.Loss"})
    lines = [line for line in violations(own, 2) if "learns at most" in line]
    assert lines == ["model: learns at most at 0.1, not at 0.5", "data: learns at most at 0.1, not at 0.5"]
    assert not [line for line in violations(own, 1) if "learns at most" in line]


def test_out_of_range_value_skips_only_the_checks_that_read_it():
    with pytest.raises(ConfigError) as error:
        compose("hparams.lr=-1", "scheduler.min_lr=1", "optimizer=muon", "peft=lora", "precision=pure_bf16")
    assert [found.key for found in error.value.violations] == ["hparams.lr", "optimizer", "precision"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.residual_scalars=true"],
        ["optimizer.cautious_weight_decay=true"],
        ["optimizer=adamw", "optimizer.cautious_weight_decay=true"],
    ],
)
def test_options_whose_effect_bf16_weights_lose_are_refused(overrides):
    compose(*overrides)
    with pytest.raises(ConfigError, match=r"lose .* to rounding; choose precision=amp_bfloat16") as error:
        compose(*overrides, "precision=pure_bf16")
    assert [found.key for found in error.value.violations] == [overrides[-1].partition("=")[0]]
