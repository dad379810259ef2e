import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from foundry.models.token_log_probs import project_log_probs
from foundry.models.token_loss import TokenLoss, ask_for_loss, project_loss


def inputs(batch=3, seq=7, width=8, vocab=19, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, seq, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (batch, seq), generator=generator)
    targets[torch.rand(batch, seq, generator=generator) < 0.3] = -100
    weights = torch.rand(batch, seq, generator=generator)
    return hidden, weight, targets, weights


def plain_loss(hidden, weight, targets, weights, z_loss_coefficient, softcap=None):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    lse = logits.logsumexp(-1)
    cross_entropy = lse - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return ((cross_entropy + z_loss_coefficient * lse.square()) * weights.masked_fill(targets < 0, 0.0)).sum()


@settings(max_examples=40, deadline=None)
@given(
    tile=st.integers(0, 30),
    batch=st.integers(1, 4),
    seq=st.integers(1, 8),
    z=st.sampled_from([0.0, 1e-4, 0.5]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_token_loss_and_gradients_match_plain_loss_for_any_tile(tile, batch, seq, z, softcap, seed):
    hidden, weight, targets, weights = inputs(batch, seq, seed=seed)
    found = project_loss(hidden, weight, targets, TokenLoss(z, weights), softcap=softcap, tile_tokens=tile)
    expected = plain_loss(hidden, weight, targets, weights, z, softcap)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-12)
    theirs = torch.autograd.grad(3.5 * expected, (hidden, weight))
    for ours, other in zip(torch.autograd.grad(3.5 * found.loss, (hidden, weight)), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    log_probs = project_log_probs(hidden.float(), weight.float(), targets, softcap=softcap)
    torch.testing.assert_close(found.log_prob.float(), log_probs.log_prob)
    torch.testing.assert_close(found.logsumexp.float(), log_probs.logsumexp)


@pytest.mark.parametrize("tile", [0, 16])
def test_bf16_loss_has_the_log_probs_of_logits_capped_in_float32(tile):
    hidden, weight, targets, _ = (tensor.detach() for tensor in inputs(dtype=torch.bfloat16))
    logits = 2.0 * (F.linear(hidden, weight).float() / 2.0).tanh()
    expected = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    made = project_loss(hidden, weight, targets, TokenLoss(), softcap=2.0, tile_tokens=tile)
    read = project_log_probs(hidden, weight, targets, softcap=2.0, tile_tokens=tile)
    for output in (made, read):
        torch.testing.assert_close(output.log_prob, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [32, 128, 1024])
def test_tiled_bf16_head_gradient_is_as_precise_as_untiled(tile):
    hidden, weight, targets, _ = inputs(8, 128, 64, 512, dtype=torch.float32)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(plain_loss(*wide, targets, torch.ones(targets.shape).double(), 0.0), wide[1])[0]

    def error(loss):
        return float((torch.autograd.grad(loss, weight)[0].double() - exact).norm() / exact.norm())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = hidden.to(torch.bfloat16)
        tiled = error(project_loss(states, weight, targets, TokenLoss(), tile_tokens=tile).loss)
        whole = error(-project_log_probs(states, weight, targets).log_prob.sum())
    assert tiled <= 1.1 * whole


def test_token_loss_projects_once_and_saves_no_logits():
    hidden, weight, targets, weights = inputs(4, 64, 8, 512, dtype=torch.float32)
    saved = []
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            loss = project_loss(hidden, weight, targets, TokenLoss(weights=weights), tile_tokens=16).loss
        loss.backward()
    assert counter.get_total_flops() == 3 * 2 * targets.numel() * weight.numel()
    assert max(saved) <= max(hidden.numel(), weight.numel())


def test_token_loss_skips_gradients_that_are_not_required():
    hidden, weight, targets, _ = inputs(dtype=torch.float32)
    frozen = weight.detach()
    with FlopCounterMode(display=False) as counter:
        project_loss(hidden, frozen, targets, TokenLoss()).loss.backward()
    assert counter.get_total_flops() == 2 * 2 * targets.numel() * weight.numel()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        found = project_loss(hidden, weight, targets, TokenLoss())
    assert counter.get_total_flops() == 2 * targets.numel() * weight.numel()
    assert not found.loss.requires_grad
    torch.testing.assert_close(
        hidden.grad, torch.autograd.grad(plain_loss(hidden, frozen, targets, 1.0 * (targets >= 0), 0), hidden)[0]
    )


def test_token_loss_falls_back_to_log_probs_of_the_model():
    class Plain(torch.nn.Module):
        def forward(self, tokens, targets, *, read=None):
            return project_log_probs(hidden, weight, targets, read=read)

    class Own(torch.nn.Module):
        def forward(self, tokens, targets, *, token_loss=None):
            return project_loss(hidden, weight, targets, token_loss)

    hidden, weight, targets, weights = inputs(dtype=torch.float32)
    token_loss = TokenLoss(0.1, weights, finds_correct=True)
    outputs = [ask_for_loss(model, targets, targets, token_loss) for model in (Plain(), Own())]
    for name in ("loss", "log_prob", "logsumexp", "correct"):
        torch.testing.assert_close(*[getattr(output, name) for output in outputs])
    likeliest = F.linear(hidden, weight).argmax(-1)
    assert torch.equal(outputs[1].correct, likeliest == targets)
    for ours, theirs in zip(*[torch.autograd.grad(output.loss, (hidden, weight)) for output in outputs], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_backward_through_token_loss_is_an_error():
    hidden, weight, targets, _ = inputs()
    loss = project_loss(hidden, weight, targets, TokenLoss()).loss
    torch.autograd.grad(loss, weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight)
