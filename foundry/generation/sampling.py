"""Drawing tokens: which the filters leave, and which of these is drawn."""

import torch
from torch import Tensor


def filtered(logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Logits divided by the temperature, then top-k, then top-p of what is left (Holtzman et al., 2020).

    Of equal logits the lower token ids are kept. Differentiable in the logits that are kept.

    Args:
        logits: (..., vocab), of any floating-point dtype, which the result has too.
        temperature: above 0.
        top_k: how many of the likeliest tokens are kept, at least 1; None: all.
        top_p: the fewest tokens whose probabilities, renormalised after top-k, sum up to it are kept, at least one.

    Returns:
        (..., vocab), not normalised; -inf where a token is left out.
    """
    scaled = logits / temperature
    if (top_k is None or top_k >= logits.shape[-1]) and top_p >= 1:
        return scaled
    ordered, order = scaled.detach().sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -torch.inf
    left_out = ordered == -torch.inf
    if top_p < 1:
        sums = _running_sums(ordered, torch.promote_types(ordered.dtype, torch.float32))
        left_out[..., 1:] |= sums[..., :-1] >= top_p * sums[..., -1:].double()
    return scaled.masked_fill(torch.zeros_like(left_out).scatter(-1, order, left_out), -torch.inf)


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row by the inverse of its cumulative distribution, in float64.

    Args:
        logits: (batch, vocab), -inf where a token is left out; at least one of a row is finite, and none is NaN or inf.
        uniforms: (batch,) float64 from [0, 1).

    Returns:
        (batch,) int64.
    """
    sums = _running_sums(logits, torch.float64)
    # Below the total for any number below 1; a token without probability adds nothing, and is never found.
    below = (uniforms.to(sums.device, non_blocking=True)[:, None] * sums[:, -1:]).long()
    return torch.searchsorted(sums, below, right=True).squeeze(-1)


def _running_sums(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Running sums of the probabilities in units of 2^-52, (..., vocab) int64.

    Sums of integers are exact in any order. On a GPU the order of `cumsum` changes from call to call, and
    `torch.use_deterministic_algorithms` refuses it for floating-point numbers. Totals stay below 2^53, so that float64
    holds each of them.

    Args:
        logits: (..., vocab).
        dtype: of the softmax: float32 or float64.
    """
    return logits.softmax(dim=-1, dtype=dtype).mul_(2.0**52).long().cumsum_(dim=-1)
