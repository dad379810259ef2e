"""Kernels used by the decoder's attention and norms."""

import pytest
import torch
import torch.nn.functional as F
from support.composition import configure
from support.devices import DEVICES, Operations, device_of
from support.tiny import SMALL_LM
from torch import nn

from foundry.models.decoder.norms import RMSNorm
from foundry.parts.model import build_model

FUSED = {
    "cpu": {"aten::_scaled_dot_product_flash_attention_for_cpu"},
    "cuda": {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"},
}


@pytest.mark.parametrize("device", DEVICES)
def test_attention_with_fewer_heads_of_keys_is_one_kernel(device):
    sizes = ["model.num_heads=4", "model.num_kv_heads=2", "model.hidden_size=256", "data.seq_len=128"]
    model = build_model(configure(*SMALL_LM, *sizes)).to(device_of(device))
    tokens = torch.zeros(2, 128, dtype=torch.int64, device=device)
    with torch.autocast(device, torch.bfloat16), Operations() as operations:
        model(tokens, tokens).log_prob.sum().backward()
    attention = [name for name in operations.names if "attention" in name and "backward" not in name]
    assert len(attention) == len(model.model.layers)
    assert set(attention) <= FUSED[device]
    num_backward = sum("attention" in name and "backward" in name for name in operations.names)
    assert num_backward == (0 if device == "cpu" else len(attention))  # a CPU has another gradient for short sequences
    assert "aten::_softmax" not in operations.names


def wide_results(norm, device):
    """Return the names of a norm's copies to float32, and its saved float32 tensors of at least the input's size."""
    x = torch.randn(2, 8, 64, device=device).bfloat16().requires_grad_()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks, torch.autocast(device, torch.bfloat16), Operations() as operations:
        y = norm(x)
    assert y.dtype == torch.bfloat16
    kept = [tensor for tensor in saved if tensor.dtype == torch.float32 and tensor.numel() >= x.numel()]
    return [name for name, dtype in operations.seen if name == "aten::_to_copy" and dtype == torch.float32], kept


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_keeps_no_tensor_in_float32(device):
    copies, kept = wide_results(RMSNorm(64, 1e-5).to(device_of(device)), device)
    assert kept == []
    assert device == "cpu" or copies == []


def test_unfused_rms_norm_keeps_float32_copies():
    """This shows that the test above can detect them."""
    copies, kept = wide_results(lambda x: F.rms_norm(x, (64,), torch.ones(64).bfloat16(), 1e-5), "cpu")
    assert copies == ["aten::_to_copy"]
    assert kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1000, 64), (5, 96), (2, 40_000), (1, 1, 2**17)], ids=str)
def test_tiled_norm_has_the_bits_of_rms_norm_and_its_gradients(shape, dtype):
    """The shapes have one tile and several, with a smaller last tile, and rows of more elements than a tile."""
    norm = RMSNorm(shape[-1], 1e-5).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(shape[-2], *shape[:-2], shape[-1], dtype=dtype).transpose(0, len(shape) - 2).requires_grad_()
    grad = torch.randn(shape, dtype=dtype)
    normed, expected = norm(x), F.rms_norm(x, shape[-1:], norm.weight, 1e-5)
    assert torch.equal(normed, expected)
    with torch.no_grad():
        assert torch.equal(norm(x), expected)
    inputs = x, norm.weight
    for own, reference in zip(
        torch.autograd.grad(normed, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(own, reference, rtol=tolerance, atol=tolerance)


def test_gradient_of_a_tiled_norm_equals_finite_differences():
    norm = RMSNorm(7, 1e-5).double()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: norm.normalize(x, weight), (x, norm.weight))
