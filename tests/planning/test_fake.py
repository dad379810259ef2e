import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from foundry.config.build import build
from foundry.models.huggingface import HuggingFaceCausalLM
from foundry.planning.fake import build_fake

TINY_HF = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


class Own(nn.Module):
    """What users write into their constructors."""

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


def assert_spread(build_model):
    """Recorded deviations are those of the real model's numbers, within four standard errors."""
    fake = build_fake(build_model)
    torch.manual_seed(0)
    real = dict(build_model().named_parameters())
    assert fake.initial_std.keys() == real.keys()
    for name, parameter in real.items():
        expected, count = fake.initial_std[name], parameter.numel()
        found = parameter.detach().float().std().item() if count > 1 else 0.0
        assert expected is not None, name
        assert found == pytest.approx(expected, abs=1e-8 + 4 * expected / math.sqrt(2 * count)), name


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
def test_spread_of_own_models(configure, overrides):
    assert_spread(lambda: build(configure(*overrides).model))


@pytest.mark.parametrize("architecture", TINY_HF)
def test_spread_of_transformers_models(architecture):
    assert_spread(lambda: hf(architecture))


def test_spread_of_a_users_model():
    assert_spread(Own)


def test_spread_is_unknown_where_it_cannot_be_followed():
    def build_model():
        model = nn.ModuleDict({"padded": nn.Embedding(100, 8, padding_idx=0), "orthogonal": nn.Linear(16, 16)})
        nn.init.orthogonal_(model["orthogonal"].weight)
        return model

    stds = build_fake(build_model).initial_std
    assert stds["padded.weight"] is None
    assert stds["orthogonal.weight"] is None
    assert stds["orthogonal.bias"] == pytest.approx(1 / math.sqrt(16 * 3))


def test_a_folder_is_not_read(tmp_path):
    hf("llama").causal_lm.save_pretrained(tmp_path)
    shapes = {name: parameter.shape for name, parameter in hf("llama", str(tmp_path)).named_parameters()}
    (tmp_path / "model.safetensors").unlink()
    fake = build_fake(lambda: hf("llama", str(tmp_path)))
    assert {name: parameter.shape for name, parameter in fake.model.named_parameters()} == shapes
    assert set(fake.initial_std.values()) == {None}


def test_building_leaves_no_trace():
    """torch's initialisation and random numbers are what they were, and the model holds fakes only."""
    draw, state = nn.init._no_grad_trunc_normal_, torch.get_rng_state()
    fake = build_fake(Own)
    assert nn.init._no_grad_trunc_normal_ is draw
    assert torch.equal(torch.get_rng_state(), state)
    assert all(isinstance(parameter, FakeTensor) for parameter in fake.model.parameters())
    with pytest.raises(ZeroDivisionError):
        build_fake(lambda: 1 / 0)
    assert nn.init._no_grad_trunc_normal_ is draw
