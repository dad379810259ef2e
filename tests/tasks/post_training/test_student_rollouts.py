"""On-policy distillation: rollouts as in GRPO, loss on the student's own tokens."""

import math

import pytest
import torch
from support.divergences import divergence
from support.rollout_parts import VOWELS, make_model, make_objective, make_source, make_student

from foundry.core.errors import ConfigError
from foundry.tasks.post_training.environments.judge import Judge
from foundry.tasks.post_training.schemas.distillation import Divergence

PLAIN = {
    "generation_temperature": 1.0,
    "generation_top_k": None,
    "generation_top_p": 1.0,
    "share_prompts": False,
}
KINDS = [
    {"divergence": Divergence.forward},
    {"divergence": Divergence.reverse, "temperature": 2.0},
    {"divergence": Divergence.mixed, "mixed_kl_weight": 0.3, "top_k": 9},
    {"divergence": Divergence.jsd, "jsd_beta": 0.2},
]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_student_loss_is_the_divergence_at_its_sampled_tokens(settings):
    model, teacher = make_model(), make_model(4)
    objective = make_student(teacher, **PLAIN, **settings)
    (part,) = make_source(objective, model, per_gpu_batch_size=16).next_window().microbatches
    student, taught = (each(part["tokens"], return_logits=True).logits for each in (model, teacher))
    is_own = part["targets"] != -100
    factor = settings.get("temperature", 1.0) ** 2
    distances = divergence(student, taught, **settings)[is_own]
    found = objective.loss(model, part)
    torch.testing.assert_close(found.loss, factor * distances.sum())
    torch.testing.assert_close(found.metrics["divergence"].sum, distances.sum())
    chosen = student.log_softmax(-1).gather(-1, part["targets"].clamp(min=0)[..., None]).squeeze(-1)
    torch.testing.assert_close(found.metrics["entropy"].sum, -chosen[is_own].sum())
    assert objective.num_valid(part) == len(distances)
    assert list(found.metrics) == ["entropy", "divergence"] == list(objective.metrics)


def test_student_completions_match_grpo_and_rewards_are_metrics_only():
    policy = make_source(make_objective(**PLAIN, ref_policy_kl_penalty=0.0), make_model()).next_window()
    with_judge, without = (
        make_source(make_student(make_model(4), **PLAIN), make_model(), judge=judge).next_window()
        for judge in (VOWELS, None)
    )
    for name in ("tokens", "targets", "position"):
        for one, other, bare in zip(policy.microbatches, with_judge.microbatches, without.microbatches, strict=True):
            assert torch.equal(one[name], other[name])
            assert torch.equal(one[name], bare[name])
            assert bare.keys() == other.keys() == {"tokens", "targets", "position"}
    assert policy.num_tokens == with_judge.num_tokens == without.num_tokens
    assert with_judge.metrics["reward"] == policy.metrics["reward"]
    assert without.metrics == {name: policy.metrics[name] for name in ("truncated", "completion_tokens")}


def test_student_at_temperature_zero_generates_argmax_tokens():
    model = make_model()
    objective = make_student(make_model(4), **{**PLAIN, "generation_temperature": 0.0})
    (part,) = make_source(objective, model, per_gpu_batch_size=16).next_window().microbatches
    is_own = part["targets"] != -100
    likeliest = model(part["tokens"], return_logits=True).logits.argmax(-1)
    assert torch.equal(part["targets"][is_own], likeliest[is_own])
    assert is_own.any()


class Infinite:
    """An environment that scores every answer as infinite."""

    def score(self, answers):
        return [{"size": math.inf} for _ in answers]


def test_failing_environment_ends_only_runs_that_train_on_rewards():
    judge = Judge(Infinite(), weights={}, name="Infinite")
    window = make_source(make_student(make_model(4), **PLAIN), make_model(), judge=judge).next_window()
    assert (window.metrics["reward_missing"], window.metrics["reward_no_number"]) == (1.0, 16.0)
    with pytest.raises(ConfigError, match="gave no reward for any answer of a rollout"):
        make_source(make_objective(**PLAIN, ref_policy_kl_penalty=0.0), make_model(), judge=judge).next_window()
    with pytest.raises(ConfigError, match="none is incompatible with the objective, which needs an environment"):
        make_source(make_objective(**PLAIN, ref_policy_kl_penalty=0.0), make_model(), judge=None)


def test_overlong_filtering_excludes_truncated_completions_from_the_loss():
    model, teacher = make_model(), make_model(4)
    (kept,), (left_out,) = (
        make_source(make_student(teacher, **PLAIN, overlong_filtering=leaves_out), model, per_gpu_batch_size=16)
        .next_window()
        .microbatches
        for leaves_out in (False, True)
    )
    lengths = (kept["targets"] != -100).sum(-1)
    is_cut = (left_out["targets"] == -100).all(-1)
    assert 0 < is_cut.sum() < 16
    assert (lengths[is_cut] == 8).all(), "at max_new_tokens"
    assert torch.equal(kept["targets"][~is_cut], left_out["targets"][~is_cut])
    objective = make_student(teacher, **PLAIN)
    assert objective.num_valid(left_out) == lengths[~is_cut].sum()
    assert objective.loss(model, {**left_out, "targets": torch.full_like(kept["targets"], -100)}).loss == 0


def test_student_rollouts_resume_between_updates():
    objective = make_student(make_model(4), **PLAIN, updates_per_rollout=2)
    source = make_source(objective, make_model(), judge=None)
    for _ in range(3):
        source.next_window()
    again = make_source(objective, make_model(), judge=None)
    again.load_state_dict(source.state_dict())
    again.load_tensors(source.tensors())
    for _ in range(3):
        one, other = source.next_window(), again.next_window()
        assert one.metrics == other.metrics
        for ours, theirs in zip(one.microbatches, other.microbatches, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_packed_student_completions_match_unpacked():
    model, objective = make_model(), make_student(make_model(4), **PLAIN, overlong_filtering=True)
    losses, valid, rows = [], [], []
    for pack_tokens in (None, 32):
        parts = make_source(objective, model, pack_tokens=pack_tokens).next_window().microbatches
        losses.append(sum(objective.loss(model, part).loss for part in parts))
        valid.append(sum(map(objective.num_valid, parts)))
        rows.append(sum(len(part["tokens"]) for part in parts))
    assert valid[0] == valid[1] > 0
    assert rows[1] < rows[0] == 16
    torch.testing.assert_close(losses[1], losses[0])
