"""Preferences, distillation and on-policy completions give the same results in packed rows as in unpacked rows."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollout_parts import make_model, make_objective, make_source, make_student
from support.updates import check_equal, step

from foundry.data.conversations.examples import Examples, Pairs
from foundry.data.loader import Loader, held_out_batches
from foundry.data.order import GlobalOrder
from foundry.data.packing import first_fit_decreasing, place_parts
from foundry.engine.columns import WithColumns
from foundry.models.transformer import Transformer
from foundry.objectives.unpacking import unpack
from foundry.parallel.process_group import World
from foundry.tasks.post_training.objectives.distillation import Distillation
from foundry.tasks.post_training.objectives.dpo import DPO
from foundry.tasks.post_training.schemas.distillation import Divergence, OutsideTopK
from foundry.tasks.post_training.schemas.objective import PreferenceLoss

VOCAB, CAPACITY, WINDOW = 40, 24, 16
LAYOUTS = [(1, 2), (4, 4)]


@given(lengths=st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(1, CAPACITY)), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_packed_pairs_are_complete_and_fit_their_rows(lengths):
    packs = first_fit_decreasing(np.array(lengths), CAPACITY)
    assert sorted(pair for pack in packs for pair in pack) == list(range(len(lengths)))
    for pack in packs:
        own = [lengths[pair] for pair in pack]
        rows = place_parts(own, 2)
        assert sorted(part for row in rows for part in row) == [(n, part) for n in range(len(own)) for part in (0, 1)]
        assert all(sum(own[pair][part] for pair, part in row) <= CAPACITY for row in rows)
    assert len(packs) <= len(lengths)


def test_unpack_separates_values_of_documents():
    documents = torch.tensor([[1, 1, 1, 0, -1], [2, 2, 4, 4, 4]])  # Document 3 is missing.
    values = torch.arange(10.0).view(2, 5).requires_grad_()
    microbatch = {"documents": documents, "position": torch.arange(5)}
    found = unpack(values, microbatch, width=4, fill=-1)
    expected = [[3, -1, -1, -1], [0, 1, 2, -1], [5, 6, -1, -1], [-1] * 4, [7, 8, 9, -1]]
    assert found.tolist() == expected
    found.sum().backward()
    assert values.grad.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert unpack(values, {"position": torch.arange(2)}) is values


def examples(count=80, seed=0, longest=20):
    """Return rows of 2 to `longest` tokens; every ninth row has no trained tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, longest + 2, count)
    offsets = np.concatenate([[0], lengths.cumsum()])
    trained = random.random(offsets[-1]) < 0.7
    for row in range(0, count, 9):
        trained[offsets[row] : offsets[row + 1]] = False
    return Examples(random.integers(0, VOCAB, offsets[-1], dtype=np.uint16), trained, offsets)


def windows(dataset, pack_tokens=None, dp_size=1, per_gpu=4, workers=0):
    """Return the microbatches of the second window of all ranks in one list."""
    order, found = GlobalOrder(num_samples=len(dataset), fingerprint="x", seed=1), []
    for rank in range(dp_size):
        sizes = {"batch_size_at": lambda samples: WINDOW, "per_gpu_batch_size": per_gpu, "num_workers": workers}
        loader = Loader(dataset=dataset, order=order, dp_rank=rank, dp_size=dp_size, pack_tokens=pack_tokens, **sizes)
        loader.next_window()
        found.append(loader.next_window().microbatches)
    assert len({len(parts) for parts in found}) == 1
    return [part for parts in found for part in parts]


def small_model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(vocab_size=VOCAB, max_seq_len=CAPACITY, init_std=0.3, **{**sizes, **changes})


@pytest.mark.parametrize(("dp_size", "per_gpu", "workers"), [(1, 1, 0), (2, 2, 0), (1, 2, 2)])
def test_packed_window_contains_both_rows_of_each_pair(dp_size, per_gpu, workers):
    pairs = Pairs(examples())
    order = GlobalOrder(num_samples=len(pairs), fingerprint="x", seed=1)
    expected = {position: pairs[int(order.indices(range(position, position + 1))[0])] for position in range(16, 32)}
    parts = windows(pairs, CAPACITY, dp_size, per_gpu, workers)
    assert sorted(p for part in parts for p in part["position"].tolist()) == list(expected)
    assert sum(part["tokens"].shape[0] for part in parts) < 16, "they share rows"
    for part in parts:
        assert part["tokens"].shape[0] <= per_gpu
        assert part["tokens"].shape[2] <= CAPACITY
        for number, position in enumerate(part["position"].tolist()):
            for kind in (0, 1):
                here = part["documents"] == 2 * number + kind
                own, length = expected[position], int(here.sum())
                assert part["tokens"][here].tolist() == own["tokens"][kind, :length].tolist()
                assert part["targets"][here].tolist() == own["targets"][kind, :length].tolist()
                assert (own["targets"][kind, length:] == -100).all()


PREFERENCES = [
    {},
    {"loss_type": PreferenceLoss.ipo, "preference_average_log_probs": True},
    {"loss_type": PreferenceLoss.hinge, "label_smoothing": 0.2, "sft_loss_weight": 0.3, "sft_average_log_probs": True},
]


@pytest.mark.parametrize("options", PREFERENCES, ids=str)
@pytest.mark.parametrize(("dp_size", "per_gpu"), LAYOUTS)
def test_packed_dpo_matches_unpacked(options, dp_size, per_gpu):
    model, reference, pairs = small_model(), small_model(1).eval().requires_grad_(False), Pairs(examples())
    objective = DPO(**options)
    objective.compare({"reference": reference})
    plain = step(model, objective, windows(pairs))
    packed = windows(pairs, CAPACITY, dp_size, per_gpu)
    check_equal(step(model, objective, packed), plain)
    # Precomputed reference log-probabilities, without packing, equal the values of each packed step.
    whole = held_out_batches(pairs, per_gpu_batch_size=4, dp_rank=0, dp_size=1, max_samples=None)
    column = torch.cat([objective.precompute(part)["reference"] for part in whole])
    joined = windows(WithColumns(pairs, {"reference": column}), CAPACITY, dp_size, per_gpu)
    for one, other in zip(joined, packed, strict=True):
        torch.testing.assert_close(one["reference"], objective.precompute(other)["reference"], rtol=1e-6, atol=1e-6)
    objective.compare({})
    check_equal(step(model, objective, joined), plain)


DISTILLATIONS = [
    {},
    {"divergence": Divergence.mixed, "mixed_kl_weight": 0.3, "top_k": 5, "temperature": 2.0},
    {"divergence": Divergence.jsd, "jsd_beta": 0.2, "top_k": 5, "outside_top_k": OutsideTopK.renormalize},
]


@pytest.mark.parametrize("options", DISTILLATIONS, ids=str)
@pytest.mark.parametrize(("dp_size", "per_gpu"), LAYOUTS)
def test_packed_distillation_matches_unpacked(options, dp_size, per_gpu):
    model, teacher, rows = small_model(), small_model(1, num_heads=2, num_layers=1), examples()
    objective = Distillation(teacher="teacher", vocab_size=VOCAB, max_seq_len=CAPACITY, **options)
    objective.compare({"teacher": teacher.eval().requires_grad_(False)})
    plain = step(model, objective, windows(rows))
    check_equal(step(model, objective, windows(rows, CAPACITY, dp_size, per_gpu)), plain)


ANSWERS = [
    {},
    {"token_level_loss": False, "sequence_level_importance_ratios": True, "use_importance_sampling_correction": True},
    {"use_kl_in_reward": True, "positive_example_nll_weight": 0.5, "overlong_filtering": True},
    {"generation_temperature": 1.0, "generation_top_k": None, "generation_top_p": 1.0, "ratio_clip_min": 0.01},
]


@pytest.mark.parametrize("options", ANSWERS, ids=str)
@pytest.mark.parametrize("updates", [1, 2])
def test_packed_grpo_matches_unpacked(options, updates):
    reference = make_model(4)
    settings = {"ref_policy_kl_penalty": 0.3, "updates_per_rollout": updates, "share_prompts": False, **options}
    check_rollouts(make_objective(reference, **settings), [reference])


@pytest.mark.parametrize("filtering", [False, True])
def test_packed_on_policy_distillation_matches_unpacked(filtering):
    options = {"top_k": 9, "divergence": Divergence.reverse, "overlong_filtering": filtering, "share_prompts": False}
    check_rollouts(make_student(make_model(4), updates_per_rollout=2, **options), [])


def check_rollouts(objective, frozen):
    model, updates = make_model(), objective.rollouts.updates_per_rollout
    make = partial(make_source, objective, model, frozen=frozen)
    plain, packed = make(), make(pack_tokens=32, per_gpu_batch_size=2)
    windows = [(plain.next_window(), packed.next_window()) for _ in range(updates)]
    with torch.no_grad():  # Move the ratios away from 1.
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    for update, (one, other) in enumerate(windows):
        assert (one.num_tokens, one.metrics) == (other.num_tokens, other.metrics)
        assert sum(len(part["tokens"]) for part in other.microbatches) < one.num_samples
        expected = step(model, objective, one.microbatches)
        check_equal(step(model, objective, other.microbatches), expected)
        first = update * one.num_samples
        lengths, on_ranks = packed._samples["length"][first : first + one.num_samples], []
        for rank in range(8):  # More ranks than rows.
            packed._world = World(rank, 0, 8, 1, torch.device("cpu"))
            on_ranks.append(packed._microbatches(first, lengths))
        assert [len(parts) for parts in on_ranks] == [1] * 8
        assert any(not len(part["position"]) for (part,) in on_ranks)
        check_equal(step(model, objective, [part for (part,) in on_ranks]), expected)


def test_microbatch_without_samples_has_zero_loss_and_gradients():
    model, reference = small_model(), small_model(1).eval().requires_grad_(False)
    rows = {"tokens": torch.zeros(2, 1, dtype=torch.int64), "targets": torch.full((2, 1), -100)}
    rows |= {"documents": torch.full((2, 1), -1), "position": torch.empty(0, dtype=torch.int64)}
    pairs = {name: tensor if name == "position" else tensor[None] for name, tensor in rows.items()}
    distillation = Distillation(teacher="teacher", vocab_size=VOCAB, max_seq_len=CAPACITY)
    for objective, part in ((DPO(), pairs), (distillation, rows)):
        objective.compare({"reference": reference, "teacher": reference})
        assert objective.num_valid(part) == 0
        loss = objective.loss(model, part).loss
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert all(float(parameter.grad.abs().sum()) == 0.0 for parameter in model.parameters())
