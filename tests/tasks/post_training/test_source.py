"""Rollouts split into windows: contents, resume, and errors of prompts and rewards."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rollout_parts import QUESTIONS, Vowels, make_data, make_model, make_objective, make_source

from foundry.core.errors import ConfigError
from foundry.tasks.post_training.environments.judge import Judge, Judgement
from foundry.tasks.post_training.rollouts.source import find_share

PLAIN = {
    "generation_temperature": 1.0,
    "generation_top_k": None,
    "generation_top_p": 1.0,
    "ref_policy_kl_penalty": 0.0,
    "share_prompts": False,
}


def same(one, other):
    assert one.metrics == other.metrics
    for a, b in zip(one.microbatches, other.microbatches, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_rollout_windows_hold_completions_log_probs_and_metrics():
    model, objective = make_model(), make_objective(**PLAIN, updates_per_rollout=2)
    source, data = make_source(objective, model), make_data()
    first, second = source.next_window(), source.next_window()
    assert first.num_samples == second.num_samples == 8
    parts = [*first.microbatches, *second.microbatches]
    assert [len(part["position"]) for part in parts] == [4] * 4
    positions = torch.cat([part["position"] for part in parts])
    assert positions.tolist() == list(range(16))
    for part in parts:
        mask = part["targets"] != -100
        inner = mask[:, 1:] & mask[:, :-1]
        assert torch.equal(part["targets"][:, :-1][inner], part["tokens"][:, 1:][inner])
        log_prob = model(part["tokens"], part["targets"]).log_prob.detach()
        assert torch.allclose(part["sampler"], log_prob, atol=1e-5), "the sampler is the trainer"
        assert torch.allclose(part["old"], log_prob, atol=1e-5)
        lengths = (mask.int().argmax(-1) + 1).tolist()
        starts = [tuple(row[:length].tolist()) for row, length in zip(part["tokens"], lengths, strict=True)]
        assert set(starts) <= {prompt.tokens for prompt in data.train_prompts}
        assert len(set(starts)) == 1, "four answers to one prompt"
    assert first.num_tokens + second.num_tokens == sum(int((part["tokens"] > 0).sum()) for part in parts)
    metrics = first.metrics
    assert 0 < metrics["reward"] == pytest.approx(2 * metrics["reward_vowels"])
    assert metrics["reward_missing"] == 0.0
    assert 0 <= metrics["groups_without_variance"] <= 1
    assert 1 <= metrics["completion_tokens"] <= 8
    assert source.next_window().metrics != metrics


def test_completions_do_not_depend_on_generation_batch_size():
    windows = []
    for size, updates in ((6, 1), (16, 1), (3, 4)):
        objective = make_objective(**PLAIN, generation_batch_size=size, updates_per_rollout=updates)
        model, rows = make_model(), set()
        model.register_forward_pre_hook(lambda model, args, rows=rows: rows.add(len(args[0])))
        source = make_source(objective, model)
        windows.append([source.next_window() for _ in range(updates)])
        assert max(rows) == size, "completions generated at a time"
    tokens = [[row.tolist() for w in ws for part in w.microbatches for row in part["targets"]] for ws in windows]
    trimmed = [[[token for token in row if token != -100] for row in rows] for rows in tokens]
    assert trimmed[0] == trimmed[1] == trimmed[2]


@given(st.integers(1, 99), st.integers(1, 40), st.integers(1, 9))
def test_completions_of_a_rollout_are_divided_evenly_among_the_ranks(count, batch_size, num_ranks):
    shares = [range(count)[find_share(count, batch_size, rank, num_ranks)] for rank in range(num_ranks)]
    assert [number for share in shares for number in share] == list(range(count))
    lengths = [len(share) for share in shares if share]
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == num_ranks or max(lengths) <= batch_size


def test_rollout_source_resumes_between_updates_bit_for_bit():
    objective = make_objective(**PLAIN, updates_per_rollout=2)
    source = make_source(objective, make_model())
    windows = [source.next_window() for _ in range(3)]
    state, tensors = source.state_dict(), source.tensors()
    assert tensors
    rest = [source.next_window() for _ in range(3)]
    again = make_source(objective, make_model())
    again.load_state_dict(state)
    again.load_tensors({name: tensor.clone() for name, tensor in tensors.items()})
    for one in rest:
        same(again.next_window(), one)
    assert source.state_dict()["update"] == 0
    assert source.tensors() == {}
    assert windows[0].metrics == windows[1].metrics != windows[2].metrics


class Some(Vowels):
    """An environment that gives no score to the answers to `dog`."""

    def score(self, answers):
        found = super().score(answers)
        return [{"vowels": None} if a.prompt == "dog" else one for a, one in zip(answers, found, strict=True)]


def test_completions_without_a_reward_are_excluded_from_the_baseline():
    objective = make_objective(**PLAIN, num_prompts_per_step=8)
    judge = Judge(Some(), weights={}, name="Some")
    window = make_source(objective, make_model(), judge=judge, per_gpu_batch_size=32).next_window()
    (part,) = window.microbatches
    missing = part["reward"].isnan()
    assert window.metrics["reward_missing"] == missing.double().mean().item() == 1 / 8
    assert not part["advantage"][missing].any()
    assert part["advantage"][~missing].any()
    assert math.isfinite(objective.loss(make_model(), part).loss.item())


class Fickle(Judge):
    """A judge that gives rewards to the n-th rollout only if the n-th value of `given` is true."""

    def __init__(self, kind, *given):
        super().__init__(None, weights={}, name="Fickle")
        fault = ("raised", "ValueError: out of office") if kind == "raised" else ()
        self.bad = Judgement(None, {}, *fault)
        self.given = iter(given)

    def judge(self, answers, heartbeat=None):
        good = [Judgement(float(number), {}) for number in range(len(answers))]
        return good if next(self.given) else [self.bad] * len(answers)


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        ("raised", [0], "a rollout (16 each); first: ValueError: out of office"),
        ("none", [0, 0, 0], "3 rollouts in a row (16 each); all scores are None"),
        ("raised", [1, 0, 0, 1, 0, 0, 0], "3 rollouts in a row (16 each); first: ValueError: out of office"),
    ],
)
def test_environment_without_rewards_ends_the_run_with_the_reason(kind, given, why):
    objective = make_objective(**PLAIN, generation_batch_size=16)
    source = make_source(objective, make_model(), judge=Fickle(kind, *given))
    for _ in given[:-1]:
        source.next_window()
    with pytest.raises(ConfigError) as caught:
        source.next_window()
    assert str(caught.value) == f"environment: Fickle gave no reward for any answer of {why}"


def test_truncated_completions_can_be_excluded_but_stay_in_the_baseline():
    objectives = [make_objective(**PLAIN, max_new_tokens=8, overlong_filtering=is_on) for is_on in (False, True)]
    sources = [make_source(objective, make_model(), per_gpu_batch_size=16) for objective in objectives]
    kept, left_out = (source.next_window() for source in sources)
    assert 0 < kept.metrics["truncated"] < 1
    (one,), (other,) = kept.microbatches, left_out.microbatches
    assert torch.equal(one["advantage"], other["advantage"])
    assert one["is_counted"].all()
    assert (~other["is_counted"]).double().mean().item() == kept.metrics["truncated"]
    objective = make_objective(**PLAIN)
    lengths = (other["targets"] != -100).sum(-1)
    assert objective.num_valid(other) == lengths[other["is_counted"]].sum() < objective.num_valid(one)


def test_prompts_without_space_or_required_columns_are_refused():
    model, data = make_model(), make_data()
    with pytest.raises(ConfigError, match=r"^objective\.max_new_tokens: leaves 2 of the model's positions"):
        make_source(make_objective(**PLAIN, max_new_tokens=30), model)
    judge = Judge(Vowels(), weights={}, name="ExactMatch", needs=("answer",))
    with pytest.raises(ConfigError, match=rf"^environment: is ExactMatch, .* but {len(QUESTIONS)} of {len(QUESTIONS)}"):
        make_source(make_objective(**PLAIN), model, judge=judge)
    with pytest.raises(ConfigError, match=r"^data: has no train_prompts"):
        make_source(make_objective(**PLAIN), model, data=replace(data, train_prompts=()))
