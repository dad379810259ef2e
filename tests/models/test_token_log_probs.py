import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.models.token_log_probs import project_log_probs, read_log_probs
from foundry.planning.live_bytes import LiveBytes


def inputs(batch=3, seq=7, width=8, vocab=19, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, seq, width, generator=generator, dtype=torch.float32).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float32).requires_grad_()
    targets = torch.randint(vocab, (batch, seq), generator=generator)
    targets[0, :3] = -100
    return hidden, weight, targets


def gradients(output, hidden, weight):
    """Return gradients of a loss that weights `log_prob` and `logsumexp` differently at each position."""
    factors = torch.linspace(0.5, 1.5, output.log_prob.numel()).view(output.log_prob.shape)
    loss = (output.log_prob * factors).sum() + (output.logsumexp * factors.flip(0)).square().sum()
    return torch.autograd.grad(loss, (hidden, weight))


def test_log_probs_match_log_softmax():
    hidden, weight, targets = inputs()
    output = project_log_probs(hidden, weight, targets, return_logits=True)
    logits = hidden @ weight.T
    expected = F.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(output.log_prob, expected.masked_fill(targets == -100, 0.0))
    torch.testing.assert_close(output.logsumexp, logits.logsumexp(-1))
    torch.testing.assert_close(output.logits, logits)
    assert output.log_prob[0, :3].tolist() == [0.0, 0.0, 0.0]


def test_log_prob_and_logsumexp_gradients_match_autograd():
    hidden, weight, targets = (t.detach().double() if t.is_floating_point() else t for t in inputs(2, 3, 4, 5))

    def both(hidden, weight):
        # The softmax is always fp32, so the reference is autograd through plain operations in fp32.
        output = project_log_probs(hidden.float(), weight.float(), targets)
        return output.log_prob, output.logsumexp

    def plain(hidden, weight):
        logits = hidden.float() @ weight.float().T
        picked = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (picked - logits.logsumexp(-1)).masked_fill(targets == -100, 0.0), logits.logsumexp(-1)

    cotangents = (torch.randn(2, 3), torch.randn(2, 3))
    for ours, theirs in zip(
        torch.autograd.functional.vjp(both, (hidden, weight), cotangents)[1],
        torch.autograd.functional.vjp(plain, (hidden, weight), cotangents)[1],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(tile=st.integers(1, 30), batch=st.integers(1, 4), seq=st.integers(1, 8), seed=st.integers(0, 99))
def test_tiled_log_probs_match_untiled(tile, batch, seq, seed):
    hidden, weight, targets = inputs(batch, seq, seed=seed)
    whole = project_log_probs(hidden, weight, targets)
    tiled = project_log_probs(hidden, weight, targets, tile_tokens=tile)
    torch.testing.assert_close(tiled.log_prob, whole.log_prob)
    torch.testing.assert_close(tiled.logsumexp, whole.logsumexp)
    assert tiled.logits is None
    for ours, theirs in zip(gradients(tiled, hidden, weight), gradients(whole, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_tiles_keep_no_logits_for_the_backward_pass():
    hidden, weight, targets = inputs(4, 64, 8, 512)
    kept = []
    for tile_tokens in (0, 16):
        with LiveBytes() as live:
            output = project_log_probs(hidden, weight, targets, tile_tokens=tile_tokens)
        kept.append(live.current)
        del output
    assert kept[0] >= 4 * 64 * 512 * 4
    assert kept[1] < 16 * 512 * 4


def test_vocabulary_chunks_match_one_softmax(monkeypatch):
    hidden, weight, targets = inputs()
    whole = project_log_probs(hidden, weight, targets)
    monkeypatch.setattr("foundry.models.token_log_probs._CPU_CHUNK_ELEMENTS", 40)
    chunked = project_log_probs(hidden, weight, targets)
    torch.testing.assert_close(chunked.log_prob, whole.log_prob)
    torch.testing.assert_close(chunked.logsumexp, whole.logsumexp)


def test_bf16_logits_get_an_fp32_softmax():
    logits = torch.full((1, 1, 4096), 8.0, dtype=torch.bfloat16)
    output = read_log_probs(logits, torch.zeros(1, 1, dtype=torch.int64))
    assert output.log_prob.dtype == output.logsumexp.dtype == torch.float32
    assert output.log_prob.item() == pytest.approx(-8.317766, abs=1e-5)  # -log 4096
    assert output.logsumexp.item() == pytest.approx(16.317766, abs=1e-5)


def test_log_probs_without_targets_return_logits_only():
    hidden, weight, _ = inputs()
    output = project_log_probs(hidden, weight, None, tile_tokens=2)
    assert output.logits.shape == (3, 7, 19)
    assert output.log_prob.shape == output.logsumexp.shape == (3, 0)


def test_ignored_targets_with_huge_logits_have_zero_loss_and_gradient():
    hidden, weight, targets = inputs()
    output = project_log_probs(hidden * 1e4, weight, torch.full_like(targets, -100))
    (output.log_prob.sum()).backward()
    assert output.log_prob.abs().max() == 0
    assert hidden.grad.abs().max() == 0


@pytest.mark.parametrize("tile_tokens", [0, 1, 4, 100])
def test_read_callback_gets_tiled_values_and_gradients(tile_tokens):
    """Gradients flow through recomputed tiles."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, soft = (torch.randn(shape, generator=generator) for shape in ((2, 5, 4), (7, 4), (2, 5, 7)))
    targets = torch.randint(7, (2, 5), generator=generator)
    hidden.requires_grad_()

    def read(logits, targets, soft):
        assert soft.shape == logits.shape
        assert len(targets) == len(logits)
        return {"distance": (logits - soft).square().sum(-1)}

    expected = (hidden @ weight.T - soft).square().sum(-1)
    ours = project_log_probs(hidden, weight, targets, tile_tokens=tile_tokens, read=read, per_token=(soft,))
    torch.testing.assert_close(ours.read["distance"], expected)
    gradients = [torch.autograd.grad(distance.sum(), hidden)[0] for distance in (ours.read["distance"], expected)]
    torch.testing.assert_close(*gradients)


def test_tiles_of_given_logits_change_neither_values_nor_gradients():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 7, 11, requires_grad=True), torch.randint(0, 11, (2, 7))
    whole, tiled = (read_log_probs(logits, targets, tile_tokens=size) for size in (0, 3))
    assert torch.allclose(whole.log_prob, tiled.log_prob)
    gradients = [torch.autograd.grad(one.log_prob.square().sum(), logits)[0] for one in (whole, tiled)]
    assert torch.allclose(*gradients)
