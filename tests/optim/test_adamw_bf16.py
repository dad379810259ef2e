"""AdamW with moments stored in bf16 matches torch's AdamW whose moments are rounded by hand after each step."""

import pytest
import torch
from support.composition import configure
from torch import nn

from foundry.core.errors import ConfigError
from foundry.optim import adamw_bf16
from foundry.optim.adamw_bf16 import Bf16AdamW
from foundry.optim.optimizers import adamw

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
SHAPES = [(7, 5), (33,), (), (64, 3)]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("chunk_bytes", [1, 300, 2**28])
@pytest.mark.parametrize("fused", [True, False])
def test_bf16_adamw_matches_fp32_adamw_with_rounded_moments(chunk_bytes, fused, monkeypatch):
    monkeypatch.setattr(adamw_bf16, "_CHUNK_BYTES", chunk_bytes)
    ours, theirs = parameters(), parameters()
    options = {**OPTIONS, "fused": fused}
    narrow, wide = Bf16AdamW(ours, **options), torch.optim.AdamW(theirs, **options, foreach=False)
    for step in range(20):
        for group in (*narrow.param_groups, *wide.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        for mine, its, grad in zip(ours, theirs, gradients(step), strict=True):
            mine.grad = its.grad = None if step == 3 and grad.ndim == 1 else grad
        narrow.step()
        wide.step()
        for mine, its in zip(ours, theirs, strict=True):
            assert torch.equal(mine, its)
            for key in ("exp_avg", "exp_avg_sq"):
                wide.state[its][key].copy_(wide.state[its][key].bfloat16())
                assert narrow.state[mine][key].dtype is torch.bfloat16
                assert torch.equal(narrow.state[mine][key].float(), wide.state[its][key])
            assert torch.equal(narrow.state[mine]["step"], wide.state[its]["step"])


def test_bf16_adamw_skips_the_update_if_found_inf():
    ours = parameters()
    optimizer = Bf16AdamW(ours, **OPTIONS)
    for found, changes in ((0.0, True), (1.0, False), (0.0, True)):
        before = [p.detach().clone() for p in ours]
        moments = [optimizer.state[p].get("exp_avg", torch.zeros(())).clone() for p in ours]
        for parameter, grad in zip(ours, gradients(0), strict=True):
            parameter.grad = grad * (float("nan") if found else 1.0)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found)
        optimizer.step()
        assert all(torch.equal(p, old) != changes for p, old in zip(ours, before, strict=True))
        kept = [torch.equal(optimizer.state[p]["exp_avg"], old) for p, old in zip(ours, moments, strict=True)]
        assert all(same != changes for same in kept)


def test_moments_dtype_bf16_selects_bf16_adamw():
    config = configure("optimizer=adamw", "optimizer.moments_dtype=bf16").optimizer
    (chosen,) = adamw(
        model=nn.Linear(3, 3),
        lr=1e-2,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0,
        moments_dtype=config.moments_dtype,
    )
    assert type(chosen) is Bf16AdamW


@pytest.mark.parametrize("overrides", [["optimizer.beta2=0.999"], ["optimizer.beta1=0.998", "optimizer.beta2=0.99"]])
def test_betas_too_close_to_one_for_bf16_moments_are_refused(overrides):
    with pytest.raises(ConfigError, match=r"optimizer\.beta[12]: is 0\.99[89], but .* at most 0\.9961"):
        configure("optimizer=adamw", "optimizer.moments_dtype=bf16", *overrides)
