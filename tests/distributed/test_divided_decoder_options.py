"""Decoder options give the logits, losses and gradients of one process under FSDP2 and tensor parallelism."""

import pytest
from support.harness import run_ranks

from foundry.config.schemas.distributed import FSDP
from foundry.config.schemas.precision import PrecisionMode

pytestmark = pytest.mark.distributed
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
OPTIONS = {
    "norms of queries and keys": {"qk_norm": True},
    "residual scalars": {"residual_scalars": True},
    "value embeddings": {"value_embeddings": [0, -1]},
    "capped logits": {"logit_softcap": 2.0},
}
LAYOUTS = {"FSDP2": FSDP(), "tensor parallel": FSDP(tensor_parallel=2)}
MODES = (PrecisionMode.fp32, PrecisionMode.amp_bfloat16)


def build(options):
    """Return a model whose vectors and scalars have other values than at initialization."""
    import torch

    from foundry.models.transformer import Transformer

    torch.manual_seed(0)
    model = Transformer(**SIZES, num_kv_heads=2, max_seq_len=8, init_std=0.2, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.5 * torch.rand(parameter.shape) + 0.1)
    return model


def outputs(model, policy, sync=None):
    """Return logits, log-probabilities, the loss, and gradients by parameter name; one tensor for all scalars."""
    from contextlib import nullcontext

    import torch
    from support.toy import full_tensor

    from foundry.models.token_loss import TokenLoss

    tokens = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    device, weights = torch.device("cpu"), torch.linspace(0.1, 1.0, 24).view(3, 8)
    with policy.autocast(device), torch.no_grad():
        read = model(tokens[:, :-1], tokens[:, 1:], return_logits=True)
    with policy.window(device), nullcontext() if sync is None else sync.microbatch(first=True, last=True):
        with policy.autocast(device):
            loss = model(tokens[:, :-1], tokens[:, 1:], token_loss=TokenLoss(0.1, weights)).loss
        loss.backward()
    if sync is not None:
        sync.finish()
    gradients = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    # One tensor, because rounding can be as large as the gradient of a single scalar.
    if scalars := [name for name, gradient in gradients.items() if gradient.ndim == 0]:
        gradients["scalars"] = torch.stack([gradients.pop(name) for name in scalars])
    return {"logits": read.logits, "log_prob": read.log_prob, "loss": loss.detach(), **gradients}


def errors(world, options):
    """Return relative errors by layout, precision and tensor, and the rounding error of one process under amp."""
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    found, policies = {}, [PrecisionPolicy(mode) for mode in MODES]
    exact, rounded = (outputs(build(options), policy) for policy in policies)
    rounding = relative(rounded, exact)
    for policy, expected in zip(policies, (exact, rounded), strict=True):
        for name, layout in LAYOUTS.items():
            parallel = parallelize(
                build(options), policy, arrange(world, layout), grad_checkpointing=True, torchcompile=False
            )
            found[name, policy.mode] = relative(outputs(parallel.model, policy, parallel.sync), expected)
    return found, rounding


def relative(ours, expected):
    assert ours.keys() == expected.keys()
    return {key: float((ours[key] - value).float().norm() / value.float().norm()) for key, value in expected.items()}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_match_one_process_under_fsdp_and_tensor_parallelism(case):
    for found, rounding in run_ranks(errors, 2, OPTIONS[case]):
        for (layout, mode), by_name in found.items():
            for key, error in by_name.items():
                # A sum over heads that lacks the part of a rank has an error of at least 0.4.
                limit = 1e-4 if mode is PrecisionMode.fp32 else 0.05 + 2 * rounding[key]
                assert error < limit < 0.4, (layout, mode, key)
