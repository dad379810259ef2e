"""The base class of objectives with rollouts, and objectives of other classes that ask for its members."""

import pytest
import torch
from support.contexts import run_context
from support.rollout_parts import SETTINGS, make_data, make_model

from foundry.core.protocols import LossSum, Objective, SourceContext
from foundry.parts.objective import with_defaults
from foundry.tasks.post_training.protocols import Prepared, Rollout, RolloutObjective
from foundry.tasks.post_training.rollouts.source import RolloutSource
from foundry.tasks.post_training.schemas.rollouts import Rollouts


class Derived(Objective):
    """Derives from the base class of all objectives, not of rollout objectives, but has the attribute `rollouts`."""

    rollouts = None

    def num_valid(self, microbatch):
        return len(microbatch["position"])

    def loss(self, model, microbatch):
        return LossSum(model(microbatch["tokens"]).sum())


class Own:
    rollouts = None
    num_valid, loss = Derived.num_valid, Derived.loss

    def prepare(self, rollout):
        return Prepared({"mine": rollout.rewards})


class Based(RolloutObjective):
    num_valid, loss = Derived.num_valid, Derived.loss


@pytest.mark.parametrize("kind", [Derived, Own, Based])
def test_objective_with_rollouts_gets_the_source_and_the_members_that_it_lacks(kind):
    without, objective = with_defaults(kind()), kind()
    assert (without.makes_samples, without.build_source) == (False, None)
    objective.rollouts = Rollouts(**SETTINGS)
    objective = with_defaults(objective)
    assert type(objective) is kind
    assert (objective.makes_samples, objective.record(None, {})) == (True, {})
    columns = objective.prepare(
        Rollout(**dict.fromkeys(("tokens", "targets", "group", "is_truncated", "sampler")), rewards=torch.ones(2))
    ).columns
    assert columns.keys() == ({"mine"} if kind is Own else set())
    assert objective.bytes_for_samples(torch.nn.Linear(2, 2), 3, 4) is None
    assert objective.example(2, 3)["tokens"].shape == (2, 3)
    run = run_context(data=make_data(), per_gpu_batch_size=4)
    context = SourceContext.of(run, model=make_model(), batch_size_at=None, build_loader=None, pack_tokens=64)
    source = objective.build_source(context)
    assert isinstance(source, RolloutSource)
    assert source.next_window().num_samples == objective.rollouts.samples_per_rollout


def test_rollouts_import_by_their_earlier_names():
    exec("from foundry.objectives.rollout import Prepared, Rollout, RolloutObjective", scope := {})
    exec("from foundry.core.protocols import Rollout as other", scope)
    assert scope["Rollout"] is scope["other"] is Rollout
    assert (scope["Prepared"], scope["RolloutObjective"]) == (Prepared, RolloutObjective)
