"""Token sampling: filters of logits, and draws from the remaining tokens."""

import torch
from torch import Tensor


def filtered(logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Divide logits by the temperature, then apply top-k, then top-p to the remaining tokens (Holtzman et al., 2020).

    Of equal logits, lower token ids are kept first. The result is differentiable with respect to the kept logits.

    Args:
        logits: (..., vocab), any floating-point dtype; the result has the same dtype.
        temperature: sampling temperature, above 0.
        top_k: number of most probable tokens to keep, at least 1; None for all.
        top_p: keep the smallest set of tokens whose probabilities, renormalized after top-k, sum to this value; at
            least one token is kept.

    Returns:
        (..., vocab), not normalized; -inf for removed tokens.
    """
    scaled = logits / temperature
    if (top_k is None or top_k >= logits.shape[-1]) and top_p >= 1:
        return scaled
    ordered, order = scaled.detach().sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -torch.inf
    is_excluded = ordered == -torch.inf
    if top_p < 1:
        sums = _running_sums(ordered, torch.promote_types(ordered.dtype, torch.float32))
        is_excluded[..., 1:] |= sums[..., :-1] >= top_p * sums[..., -1:].double()
    return scaled.masked_fill(torch.zeros_like(is_excluded).scatter(-1, order, is_excluded), -torch.inf)


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample a token for each row by inverting its cumulative distribution in float64.

    Args:
        logits: (batch, vocab), -inf for removed tokens; each row has at least one finite logit, and no NaN or +inf.
        uniforms: (batch,) float64 in [0, 1).

    Returns:
        (batch,) int64.
    """
    sums = _running_sums(logits, torch.float64)
    # `below` is less than the total for any uniform below 1. A token of probability 0 adds nothing to the sums, so
    # `searchsorted` never returns it.
    below = (uniforms.to(sums.device, non_blocking=True)[:, None] * sums[:, -1:]).long()
    return torch.searchsorted(sums, below, right=True).squeeze(-1)


def _running_sums(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cumulative sums of the probabilities in units of 2^-52, (..., vocab) int64.

    Integer sums are exact in any order. On a GPU the order of `cumsum` changes from call to call, and
    `torch.use_deterministic_algorithms` rejects it for floating-point numbers. Totals stay below 2^53, so that float64
    represents each of them exactly.

    Args:
        logits: (..., vocab).
        dtype: type of the softmax: float32 or float64.
    """
    return logits.softmax(dim=-1, dtype=dtype).mul_(2.0**52).long().cumsum_(dim=-1)
