"""Sequences that share prefixes in one row have the same outputs and gradients as separate rows."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICES, device_of
from support.examples import examples
from support.varlen_kernel import kernel_on_cpu

from foundry.models.attention.branches import Branches, takes_branches
from foundry.models.transformer import Transformer

VOCAB, LONGEST = 30, 12
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
LAYOUTS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(1, LONGEST - 6), min_size=1, max_size=4)), min_size=1, max_size=4
)


def make_model(**options):
    torch.manual_seed(0)
    return Transformer(vocab_size=VOCAB, max_seq_len=LONGEST, init_std=0.3, **SIZES, **options)


@given(layout=LAYOUTS, seed=st.integers(0, 1000), rich=st.booleans())
@settings(max_examples=examples(50), deadline=None)
def test_shared_prefixes_leave_log_probs_and_gradients_unchanged(layout, seed, rich):
    model = make_model(**({"qk_norm": True, "value_embeddings": [-1], "residual_scalars": True} if rich else {}))
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(VOCAB, (count,), generator=generator)  # noqa: E731
    prefixes = [draw(length) for length, _ in layout]
    branches = [(group, draw(length)) for group, (_, lengths) in enumerate(layout) for length in lengths]
    targets = [draw(len(tokens)) for _, tokens in branches]
    row = torch.cat([*prefixes, *(tokens for _, tokens in branches)])[None]
    num_shared = sum(map(len, prefixes))
    row_targets = torch.cat([torch.full((num_shared,), -100), *targets])[None]
    described = torch.tensor([[group, len(tokens)] for group, tokens in branches])
    shape = Branches(torch.tensor([len(prefix) for prefix in prefixes]), described, torch.device("cpu"))
    assert shape.longest == max(len(prefixes[group]) + len(tokens) for group, tokens in branches)
    shared = model(row, row_targets, branches=shape).log_prob[0, num_shared:]
    alone = []
    for (group, tokens), own_targets in zip(branches, targets, strict=True):
        whole = torch.cat([prefixes[group], tokens])[None]
        alone.append(model(whole, torch.cat([torch.full_like(prefixes[group], -100), own_targets])[None]).log_prob[0])
        alone[-1] = alone[-1][len(prefixes[group]) :]
    expected = torch.cat(alone)
    torch.testing.assert_close(shared, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(len(expected), generator=generator)
    ours = torch.autograd.grad((weights * shared).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((weights * expected).sum(), list(model.parameters()))
    # A token that sees itself only has no gradient of queries and keys, but the rounding errors of larger gradients.
    rounding = 1e-6 * max(float(gradient.abs().max()) for gradient in theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=max(rounding, 1e-5 * float(other.abs().max())))


@given(layout=LAYOUTS, heads=st.sampled_from([(2, 2), (4, 2)]))
@settings(max_examples=examples(100), deadline=None)
def test_attention_with_the_variable_length_kernel_matches_padded_attention(layout, heads):
    torch.manual_seed(0)
    described = torch.tensor([[group, length] for group, (_, lengths) in enumerate(layout) for length in lengths])
    prefix_lengths = torch.tensor([length for length, _ in layout])
    num_tokens = int(prefix_lengths.sum() + described[:, 1].sum())
    shapes = [(1, count, num_tokens, 8) for count in (heads[0], heads[1], heads[1])]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], dtype=torch.float64)
    branches = Branches(prefix_lengths, described, torch.device("cpu"))
    results = []
    for context in (nullcontext([]), kernel_on_cpu()):
        with context as calls:
            attended = branches.attend(*leaves)
            results.append([attended, *torch.autograd.grad((attended * weights).sum(), leaves)])
    assert len(calls) == 1
    for padded, by_kernel in zip(*results, strict=True):
        torch.testing.assert_close(by_kernel, padded)


@pytest.mark.parametrize("device", DEVICES)
def test_shared_prefixes_on_devices_match_separate_rows(device):
    """On a GPU this calls the variable-length kernel in bfloat16, whose gradients must be the same each time."""
    device, is_gpu = device_of(device), device == "cuda"
    model = make_model().to(device)
    prefix, tokens = torch.randint(VOCAB, (1, 5), device=device), torch.randint(VOCAB, (3, 6), device=device)
    branches = Branches(torch.tensor([5]), torch.tensor([[0, 6]] * 3), torch.device(device))
    row, whole = torch.cat([prefix, tokens.view(1, -1)], dim=1), torch.cat([prefix.expand(3, -1), tokens], dim=1)
    gradients = []
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=is_gpu):
        for _ in range(2):
            shared = model(row, row, branches=branches).log_prob[0, 5:].view(3, 6)
            gradients.append(torch.autograd.grad(shared.sum(), list(model.parameters())))
        alone = model(whole, whole).log_prob[:, 5:]
    tolerance = 0.1 if is_gpu else 1e-5
    torch.testing.assert_close(shared, alone, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_length_of_a_branch_with_its_prefix_is_limited_and_not_that_of_the_row():
    model = make_model()
    row = torch.zeros(1, 4 + 5 * 8, dtype=torch.int64)
    layout = [Branches(torch.tensor([4]), torch.tensor([[0, 8]] * 5), torch.device("cpu"))]
    assert model(row, row, branches=layout[0]).log_prob.shape == row.shape
    long = Branches(torch.tensor([4]), torch.tensor([[0, 9]] * 5), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"a sequence of 13 tokens exceeds model\.max_seq_len=12"):
        model(torch.zeros(1, 4 + 5 * 9, dtype=torch.int64), branches=long)


def test_model_without_the_argument_does_not_take_branches():
    assert takes_branches(make_model())
    assert not takes_branches(torch.nn.Linear(2, 2))
