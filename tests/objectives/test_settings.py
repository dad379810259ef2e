"""Objectives accept their settings as one object or by keyword, also through a subclass."""

from dataclasses import fields

import pytest

import foundry
from foundry.config.composition.store import group_schemas
from foundry.config.metrics import declared_metrics
from foundry.tasks.post_training.schemas.policy import KLType

OPEN = {
    "DPO": {},
    "Diffusion": {"num_classes": 10},
    "Distillation": {"teacher": "runs/teacher", "vocab_size": 5, "max_seq_len": 3},
    "DiffusionPolicy": {"horizon": 8, "action_dim": 2, "seed": 1},
    "FlowPolicy": {"horizon": 8, "action_dim": 2, "seed": 1},
    "ActionRegression": {"horizon": 8, "action_dim": 2},
    "GRPO": {},
    "NextToken": {},
    "SFT": {},
}
"""Settings of each objective that have no default if it is built outside a run."""


@pytest.mark.parametrize("name", OPEN)
def test_objective_settings_are_equal_by_keyword_object_and_subclass(name):
    part, schema = getattr(foundry, name), group_schemas("objective")[name]

    class Own(part):
        def __init__(self, *, extra=1, **keywords):
            super().__init__(**keywords)
            self.extra = extra

    by_keyword = part(**OPEN[name])
    assert type(by_keyword.settings) is schema
    assert part(by_keyword.settings).settings is by_keyword.settings
    own = Own(extra=3, **OPEN[name])
    assert (own.extra, own.settings) == (3, by_keyword.settings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        part(**OPEN[name], unknown=1)


def test_every_objective_is_covered_by_the_settings_tests():
    named = {n: s for n, s in group_schemas("objective").items() if any(f.name == "_target_" for f in fields(s))}
    assert set(OPEN) == set(named)


def test_settings_and_run_arguments_can_be_passed_together():
    objective = foundry.GRPO(ratio_clip_min=0.3, kl_type=KLType.k1, num_prompts_per_step=2, has_adapters=True)
    assert (objective.settings.ratio_clip_min, objective.settings.kl_type) == (0.3, KLType.k1)
    assert objective.rollouts.num_prompts_per_step == 2
    assert objective.frozen_models == {}
    assert foundry.GRPO(has_adapters=False).frozen_models == {"reference": None}


@pytest.mark.parametrize("name", OPEN)
def test_subclass_or_instance_may_declare_other_metrics(name):
    part = getattr(foundry, name)

    class Own(part):
        metrics = ("distance",)

    class Silent(part):
        def loss(self, model, microbatch):
            raise NotImplementedError

    assert declared_metrics(part(**OPEN[name])) == part(**OPEN[name]).settings.metrics
    assert declared_metrics(Own(**OPEN[name])) == ("distance",)
    silent = Silent(**OPEN[name])
    assert declared_metrics(silent) is None
    silent.metrics = ["length"]
    assert declared_metrics(silent) == ("length",)
