import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from foundry.config.build import build
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.planning.fake import build_fake

TINY_HF = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


class Own(nn.Module):
    """A custom model with common ways of initializing parameters."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(64, 64) * 0.02)
        self.shifted = nn.Parameter(torch.rand(64, 64, dtype=torch.bfloat16) / 4 + 1)
        self.copied = nn.Parameter(self.scaled.detach().clone())
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 64), mean=0.01, std=0.02, a=-0.02, b=0.03))
        self.rare = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 64), a=1.0, b=3.0))
        self.convolution = nn.Conv2d(16, 16, 3)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(32, 4)
        self.gain = nn.Parameter(torch.tensor(0.8))


def assert_shapes(build_model):
    """Assert that parameters and buffers of the fake and the real model have equal shapes and dtypes."""
    fake, real = build_fake(build_model).model.state_dict(), build_model().state_dict()
    described = [{name: (t.shape, t.dtype) for name, t in state.items()} for state in (fake, real)]
    assert described[0] == described[1]


def hf(architecture, path=None, **options):
    return HuggingFaceCausalLM(
        path=path,
        architecture=architecture,
        config={} if path else TINY_HF[architecture],
        vocab_size=300,
        max_seq_len=16,
        **options,
    )


@pytest.mark.parametrize("overrides", [(), ("model.tie_embeddings=true",), ("hparams=diffusion",)])
def test_fake_shapes_match_built_in_models(configure, overrides):
    assert_shapes(lambda: build(configure(*overrides).model))


@pytest.mark.parametrize("architecture", TINY_HF)
def test_fake_shapes_match_transformers_models(architecture):
    assert_shapes(lambda: hf(architecture))


def test_fake_shapes_match_a_custom_model():
    assert_shapes(Own)


def test_fake_build_does_not_read_pretrained_weights(tmp_path):
    hf("llama").causal_lm.save_pretrained(tmp_path)
    shapes = {name: parameter.shape for name, parameter in hf("llama", str(tmp_path)).named_parameters()}
    (tmp_path / "model.safetensors").unlink()
    fake = build_fake(lambda: hf("llama", str(tmp_path)))
    assert {name: parameter.shape for name, parameter in fake.model.named_parameters()} == shapes


def test_fake_build_restores_torch_init_and_random_state():
    """After a failed build, torch's init is restored as well; all parameters of a fake build are fake tensors."""
    draw, state = nn.init._no_grad_trunc_normal_, torch.get_rng_state()
    fake = build_fake(Own)
    assert nn.init._no_grad_trunc_normal_ is draw
    assert torch.equal(torch.get_rng_state(), state)
    assert all(isinstance(parameter, FakeTensor) for parameter in fake.model.parameters())
    with pytest.raises(ZeroDivisionError):
        build_fake(lambda: 1 / 0)
    assert nn.init._no_grad_trunc_normal_ is draw
