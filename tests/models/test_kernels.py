"""Kernels used by the decoder's attention and norms."""

import pytest
import torch
from support.composition import configure
from support.devices import DEVICES, Operations, device_of
from support.tiny import SMALL_LM

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
    assert sum("attention" in name and "backward" in name for name in operations.names) == len(attention)
    assert "aten::_softmax" not in operations.names


def wide_results(device):
    """Return the names of a norm's copies to float32, and its saved float32 tensors of at least the input's size."""
    norm = RMSNorm(64, 1e-5).to(device_of(device))
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


@pytest.mark.gpu
def test_a_norm_makes_no_copy_in_float32():
    assert wide_results("cuda") == ([], [])


def test_unfused_rms_norm_makes_a_float32_copy():
    """The CPU has no fused kernel; this shows that the GPU test can detect a copy."""
    copies, kept = wide_results("cpu")
    assert copies == ["aten::_to_copy"]
    assert kept
