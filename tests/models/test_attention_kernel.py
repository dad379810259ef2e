"""Attention whose gradient foundry computes for short bf16 sequences on CPUs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import Operations
from support.examples import examples

from foundry.core.planned_device import plan_for
from foundry.models.attention import kernel
from foundry.models.attention.kernel import attend

KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


def make_inputs(batch, heads, kv_heads, queries, keys, head_dim, dtype=torch.bfloat16):
    """Return queries, keys, values, and a gradient of the output, with the strides of a projection's output."""
    shapes = [(batch, queries, heads), (batch, keys, kv_heads), (batch, keys, kv_heads), (batch, queries, heads)]
    *inputs, grad = (torch.randn(*shape, head_dim, dtype=dtype).transpose(1, 2) for shape in shapes)
    return [tensor.requires_grad_() for tensor in inputs], grad


def errors(gradients, expected):
    return [
        ((own.double() - exact).norm() / exact.norm().clamp_min(1e-3)).item()
        for own, exact in zip(gradients, expected, strict=True)
    ]


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(0, 40),
    keys=st.integers(0, 40),
    head_dim=st.sampled_from((8, 16, 24)),
    kind=st.sampled_from(("causal", "full", "mask", "shared mask")),
    part=st.sampled_from((1, 2000, 2**18)),
    block=st.sampled_from((1, 7, 128)),
    seed=st.integers(0, 2**16),
)
def test_outputs_have_the_bits_of_torch_and_gradients_are_as_precise(
    batch, kv_heads, groups, queries, keys, head_dim, kind, part, block, seed
):
    """A size of parts of 1 differentiates each head alone. A mask has queries that attend to no key."""
    torch.manual_seed(seed)
    keys = queries if kind == "causal" else keys
    inputs, grad = make_inputs(batch, groups * kv_heads, kv_heads, queries, keys, head_dim)
    mask = torch.rand(1 if kind == "shared mask" else batch, 1, queries, keys) < 0.5 if "mask" in kind else None
    options = {"is_causal": kind == "causal", "enable_gqa": groups > 1}
    theirs = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact_output = F.scaled_dot_product_attention(*exact, attn_mask=mask, **options)
    expected = torch.autograd.grad(exact_output, exact, grad.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_PART_ELEMENTS", part)
        patch.setattr(kernel, "_CAUSAL_QUERIES", block)
        own = attend(*inputs, mask=mask, is_causal=kind == "causal")
        gradients = torch.autograd.grad(own, inputs, grad)
    assert torch.equal(own, theirs)
    torch_errors = errors(torch.autograd.grad(theirs, inputs, grad), expected)
    for name, error, torch_error in zip(
        ["query", "key", "value"], errors(gradients, expected), torch_errors, strict=True
    ):
        assert error <= max(1.2 * torch_error, 6e-3), name


def backward_names(inputs, grad, **options):
    output = attend(*inputs, **options)
    with Operations() as operations:
        output.backward(grad)
    return operations.names


def test_only_short_bf16_sequences_have_their_own_gradient():
    assert KERNEL not in backward_names(*make_inputs(1, 2, 2, 512, 512, 8))
    assert KERNEL in backward_names(*make_inputs(1, 2, 2, 513, 513, 8))
    assert KERNEL in backward_names(*make_inputs(1, 2, 2, 16, 16, 8, torch.float32))


def test_heads_that_are_not_contiguous_have_the_gradient_of_torch():
    inputs, grad = make_inputs(1, 2, 2, 16, 16, 8)
    strided = [tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*strided), strided, grad)
    for own, theirs in zip(torch.autograd.grad(attend(*strided), strided, grad), expected, strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_for_gpus_counts_the_kernel_of_torch(device):
    with plan_for(device):
        names = backward_names(*make_inputs(1, 2, 2, 16, 16, 8))
    assert (KERNEL in names) == (device == "cuda")


def test_precision_of_other_matrix_products_stays():
    inputs, grad = make_inputs(2, 2, 2, 16, 16, 8)
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    attend(*inputs, is_causal=True).backward(grad)
    assert products.fp32_precision == before


def test_gradients_of_some_inputs_only():
    inputs, grad = make_inputs(2, 2, 2, 16, 16, 8)
    expected = torch.autograd.grad(attend(*inputs), inputs, grad)
    query, key, value = inputs
    (of_value,) = torch.autograd.grad(attend(query.detach(), key.detach(), value), [value], grad)
    assert torch.equal(of_value, expected[2])
