"""Drawing tokens: which the filters leave, and which of these is drawn."""

import torch
from torch import Tensor


def filtered(logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Logits divided by the temperature, then top-k, then top-p of what is left (Holtzman et al., 2020).

    Of equal logits the lower token ids are kept. Differentiable in the logits that are kept.

    Args:
        logits: (..., vocab), of any floating-point dtype, which the result has too; probabilities are summed in it.
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
        probabilities = ordered.softmax(dim=-1)
        left_out |= probabilities.cumsum(dim=-1) - probabilities >= top_p
        left_out[..., 0] = False  # whatever rounding says of a tiny top_p
    return scaled.masked_fill(torch.zeros_like(left_out).scatter(-1, order, left_out), -torch.inf)


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row by the inverse of its cumulative distribution, in float64.

    Args:
        logits: (batch, vocab), -inf where a token is left out.
        uniforms: (batch,) float64 from [0, 1).

    Returns:
        (batch,) int64.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # Rounding leaves the last sum a little beside 1; a token without probability adds nothing, and is never found.
    below = uniforms.to(cumulative.device).unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, below, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
