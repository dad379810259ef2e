import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.models.recomputation import recomputed

_IMPORTS = """
import sys, torch
from foundry.models.token_log_probs import project_log_probs
hidden, weight = torch.ones(1, 4, 2, requires_grad=True), torch.ones(5, 2, requires_grad=True)
project_log_probs(hidden, weight, torch.zeros(1, 4, dtype=torch.int64), tile_tokens=2).log_prob.sum().backward()
print(hidden.grad is not None, "torch._dynamo" in sys.modules)
"""


def inputs(seed, rows=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((rows, 4), (4, 7))]


def scores(x, weight, targets, calls):
    """Return two outputs in a nested structure, computed by a matrix product and a softmax."""
    calls.append(torch.is_autocast_enabled("cpu"))
    logits = (x @ weight).float()
    return F.cross_entropy(logits, targets, reduction="none"), {"sums": [logits.exp().sum(-1)]}


def total(output):
    losses, others = output
    return (losses * torch.linspace(0.5, 1.5, len(losses))).sum() + others["sums"][0].log().sum()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), rows=st.integers(1, 9), is_autocast=st.booleans())
def test_recomputed_function_has_equal_results_and_gradients(seed, rows, is_autocast):
    (x, weight), targets, calls = inputs(seed, rows), torch.arange(rows) % 7, list[bool]()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        plain = total(scores(x, weight, targets, []))
        ours = total(recomputed(scores, x, weight, targets, calls))
    assert torch.equal(ours, plain)
    expected = torch.autograd.grad(plain, (x, weight))
    assert calls == [is_autocast]
    # The backward pass runs without autocast, and the second call with the settings of the first.
    gradients = torch.autograd.grad(ours, (x, weight), retain_graph=True)
    assert calls == [is_autocast] * 2
    again = torch.autograd.grad(ours, (x, weight))
    for gradient, repeated, value in zip(gradients, again, expected, strict=True):
        assert torch.equal(gradient, value)
        assert torch.equal(repeated, value)


def test_second_call_draws_the_random_numbers_of_the_first():
    (x, weight), drawn = inputs(0), list[torch.Tensor]()

    def function(x, weight):
        drawn.append(torch.rand(5, 7))
        return ((x @ weight).exp() * drawn[-1]).sum()

    output = recomputed(function, x, weight)
    following = torch.get_rng_state()
    output.backward()
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), following)
    expected = ((x @ weight).exp() * drawn[0]).sum()
    assert torch.equal(x.grad, torch.autograd.grad(expected, x)[0])


def test_function_is_called_once_without_gradients():
    (x, weight), calls = inputs(0), list[bool]()
    with torch.no_grad():
        output = total(recomputed(scores, x, weight, torch.zeros(5, dtype=torch.int64), calls))
    assert calls == [False]
    assert not output.requires_grad


def test_function_that_computes_something_else_in_its_second_call_is_an_error():
    (x, weight), calls = inputs(0), list[int]()

    def function(x, weight):
        calls.append(1)
        y = x @ weight
        return (y.exp() if len(calls) == 1 else y.exp().exp()).sum()

    with pytest.raises(AssertionError, match="something else in its second call"):
        recomputed(function, x, weight).backward()


def test_tiles_of_log_probs_do_not_import_the_compiler():
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
