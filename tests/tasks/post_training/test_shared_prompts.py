"""Shared prompts give the same counts, losses, metrics and gradients as separate rows."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.rollout_parts import make_model, make_objective, make_source, make_student
from support.updates import check_equal, step

from foundry.core.errors import ConfigError
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.objectives.unpacking import unpack
from foundry.parallel.process_group import World
from foundry.tasks.post_training.objectives.grpo import GRPO
from foundry.tasks.post_training.rollouts.shared_prompts import resolve_sharing, restore_columns, share_prompts
from foundry.tasks.post_training.schemas.distillation import Divergence

NO_FILTERS = {"generation_temperature": 1.0, "generation_top_k": None, "generation_top_p": 1.0}
POLICIES = [
    {},
    {"token_level_loss": False, "sequence_level_importance_ratios": True, "use_importance_sampling_correction": True},
    {"use_kl_in_reward": True, "positive_example_nll_weight": 0.5, "overlong_filtering": True},
    NO_FILTERS,
]


@given(data=st.data(), num_generations=st.integers(1, 4), longest=st.integers(2, 9))
@settings(max_examples=examples(100), deadline=None)
def test_shared_row_holds_the_tokens_targets_and_columns_of_each_completion(data, num_generations, longest):
    draw = data.draw
    count = draw(st.integers(1, 4)) * num_generations
    lengths = torch.tensor(draw(st.lists(st.integers(1, longest), min_size=count, max_size=count)))
    tokens = torch.tensor(
        draw(st.lists(st.lists(st.integers(1, 2), min_size=longest, max_size=longest), min_size=count, max_size=count))
    )
    num_ignored = torch.tensor(draw(st.lists(st.integers(0, longest), min_size=count, max_size=count)))
    columns = torch.arange(longest)
    is_token, is_target = columns < lengths[:, None], columns >= num_ignored[:, None]
    tokens = tokens.where(is_token, 0)
    targets = (tokens + 10).where(is_token & is_target, -100)
    own = (torch.arange(count * longest).view(count, longest) + 1.0).where(is_token, 0.0)
    samples = {"tokens": tokens, "targets": targets, "length": lengths, "own": own, "position": torch.arange(count)}
    first = draw(st.integers(0, count - 1))
    numbers = range(first, draw(st.integers(first + 1, count)))
    part = share_prompts(samples, numbers, samples["position"] // num_generations)
    assert part["position"].tolist() == [*numbers]
    assert part["tokens"].shape == part["targets"].shape == part["documents"].shape
    assert part["prefix_lengths"].sum() + part["branches"][:, 1].sum() == part["tokens"].shape[1]
    shared = part["tokens"][part["documents"] == -1].split(part["prefix_lengths"].tolist())
    for index, (number, (prefix, length)) in enumerate(zip(numbers, part["branches"].tolist(), strict=True)):
        is_own = part["documents"] == index
        start = len(shared[prefix])
        assert start + length == lengths[number]
        whole = torch.cat((shared[prefix], part["tokens"][is_own]))
        assert whole.tolist() == tokens[number, : lengths[number]].tolist()
        assert (targets[number, :start] == -100).all()
        assert part["targets"][is_own].tolist() == targets[number, start : lengths[number]].tolist()
        assert part["own"][index, :length].tolist() == own[number, start : lengths[number]].tolist()
        assert not part["own"][index, length:].any()
    restored = restore_columns({"own": part["own"]}, part, width=longest)["own"]
    starts = part["prefix_lengths"][part["branches"][:, 0]]
    assert torch.equal(restored, own[first : numbers.stop].where(columns >= starts[:, None], 0.0))
    unpacked = unpack(part["tokens"], part, width=part["own"].shape[1])
    assert torch.equal(unpacked > 0, part["own"] > 0)
    for group in part["branches"][:, 0].unique().tolist():  # no common token before a target stays unshared
        rows = [numbers[row] for row in (part["branches"][:, 0] == group).nonzero()[:, 0].tolist()]
        start = len(shared[group])
        next_tokens = {int(tokens[row, start]) for row in rows}
        is_last = any(start + 1 >= lengths[row] for row in rows)
        assert is_last or len(next_tokens) > 1 or (targets[rows, start] != -100).any()


def check_shared(make, frozen):
    """Check that updates with shared prompts match updates with separate rows, for several layouts."""
    model, sources = make_model(), {}
    updates = make(False).rollouts.updates_per_rollout
    for shares in (False, True):
        sources[shares] = make_source(make(shares), model, frozen=frozen)
    layouts = {"packed": {"pack_tokens": 32, "per_gpu_batch_size": 2}, "whole": {"per_gpu_batch_size": 16 // updates}}
    sources |= {name: make_source(make(True), model, frozen=frozen, **options) for name, options in layouts.items()}
    windows = [{name: source.next_window() for name, source in sources.items()} for _ in range(updates)]
    with torch.no_grad():  # Move the ratios away from 1.
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    for update, of_sources in enumerate(windows):
        plain = of_sources.pop(False)
        expected = step(model, make(False), plain.microbatches)
        num_tokens = sum(part["tokens"].numel() for part in plain.microbatches)
        for window in of_sources.values():
            assert (window.num_samples, window.num_tokens) == (plain.num_samples, plain.num_tokens)
            assert window.metrics == pytest.approx(plain.metrics, rel=1e-5)
            assert sum(part["tokens"].numel() for part in window.microbatches) < num_tokens
            check_equal(step(model, make(True), window.microbatches), expected, rounding=1e-5)
        shared, first, on_ranks = sources[True], update * plain.num_samples, []
        lengths = shared._samples["length"][first : first + plain.num_samples]
        for rank in range(2):
            shared._world = World(rank, 0, 2, 1, torch.device("cpu"))
            on_ranks += shared._microbatches(first, lengths)
        check_equal(step(model, make(True), on_ranks), expected, rounding=1e-5)


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("updates", [1, 2])
def test_grpo_with_shared_prompts_matches_separate_rows(options, updates):
    reference = make_model(4)
    settings = {"ref_policy_kl_penalty": 0.3, "updates_per_rollout": updates, **options}
    check_shared(lambda shares: make_objective(reference, share_prompts=shares, **settings), [reference])


@pytest.mark.parametrize("options", [{}, NO_FILTERS], ids=str)
def test_recorded_log_probs_with_shared_prompts_match_those_of_separate_rows(options):
    model, reference, counts, recorded = make_model(), make_model(4), {}, {}
    for shares in (False, True):
        objective = make_objective(reference, share_prompts=shares, updates_per_rollout=2, **options)
        source = make_source(objective, model, frozen=[reference])
        read = []
        with reference.register_forward_pre_hook(
            lambda module, arguments, read=read: read.append(arguments[0].numel())
        ):
            source.next_window()
        counts[shares], recorded[shares] = sum(read), source.tensors()
    assert counts[True] < counts[False]
    for name in ("old", "reference"):
        torch.testing.assert_close(recorded[True][name], recorded[False][name], rtol=0, atol=1e-5)
        assert recorded[True][name].any()


@pytest.mark.parametrize("filtering", [False, True])
def test_on_policy_distillation_with_shared_prompts_matches_separate_rows(filtering):
    options = {"top_k": 9, "divergence": Divergence.reverse, "overlong_filtering": filtering}
    teacher = make_model(4)
    check_shared(lambda shares: make_student(teacher, share_prompts=shares, **options), [])


class Own(GRPO):
    """An objective that overrides the loss."""

    def loss(self, model, microbatch):
        return super().loss(model, microbatch)


class Declared(Own):
    """Declares that its loss supports the layout."""

    shares_prompts = True
    loss = Own.loss


def test_prompts_are_shared_if_model_and_objective_support_it():
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    hf = HuggingFaceCausalLM(path=None, architecture="llama", vocab_size=280, max_seq_len=32, config=config)
    own, declared = Own(), Declared()
    cases = [
        (make_objective(), make_model(), None),
        (declared, make_model(), None),
        (make_objective(), hf, "the forward() of HuggingFaceCausalLM does not take branches"),
        (own, make_model(), "Own defines loss() without shares_prompts"),
        (make_student(hf), make_model(), "Distillation.shares_prompts is False"),
    ]
    for objective, model, problem in cases:
        resolve = partial(resolve_sharing, objective, model)
        settings = objective.rollouts
        assert resolve(is_compiled=False) is (problem is None)
        assert not resolve(is_compiled=True)
        objective.rollouts = replace(settings, share_prompts=False)
        assert not resolve(is_compiled=False)
        objective.rollouts = replace(settings, share_prompts=True)
        if problem is None:
            assert resolve(is_compiled=False)
            continue
        with pytest.raises(ConfigError) as refused:
            resolve(is_compiled=False)
        assert str(refused.value) == f"objective.share_prompts: is true but {problem}; set it to false"


def test_sharing_with_compilation_is_refused():
    hparams = SimpleNamespace(
        torchcompile=True, batch_schedule=None, batch_ramp=SimpleNamespace(start=None), global_batch_size=16
    )
    hparams.allow_rounding = False
    run = SimpleNamespace(hparams=hparams, environment=object(), evaluation=SimpleNamespace(evaluators={}))
    found = [str(each) for each in make_objective(share_prompts=True).rollouts.check_with(run, None)]
    message = "objective.share_prompts: is true together with hparams.torchcompile, which would compile the model for"
    assert any(line.startswith(message) for line in found)
    assert not list(make_objective().rollouts.check_with(run, None))
