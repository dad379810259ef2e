"""Loss over a projection onto the vocabulary that computes gradients tile by tile, without keeping the logits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundry.core.planned_device import planned_device
from foundry.models.tensor_parallel import VocabularyShard

_CPU_TILE_TOKENS = 256
_TILE_ELEMENTS = 2**28
"""Number of logits per tile on devices other than CPUs, about 2 GB at 8 bytes each.

With smaller tiles, the matrix product on these devices would take less time than reading and writing the head's float32
gradient. CPUs are fastest with a few hundred tokens.
"""
_CPU_ROWS = 2048
"""Number of rows of a matrix that a CPU adds at a time."""


def _tile_tokens(device_type: str, vocab_size: int) -> int:
    """Return the default number of tokens to project at a time, for the planned device if there is one."""
    is_cpu = (planned_device() or device_type) == "cpu"
    return _CPU_TILE_TOKENS if is_cpu else max(1, _TILE_ELEMENTS // vocab_size)


def projected_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    z_loss_coefficient: float = 0.0,
    finds_correct: bool = False,
    softcap: float | None = None,
    tile_tokens: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum weight x (cross-entropy + z_loss_coefficient x log-sum-exp²) over tokens.

    The forward pass also computes the gradients of hidden states and head, tile by tile, so each logit is computed once
    and none is kept. The head's gradient is accumulated in float32 or wider. A second backward pass raises an error.

    If the vocabulary is sharded over ranks, each rank computes only the logits of its shard. The ranks exchange one
    maximum and two sums per token, and the sum of the gradient of the hidden states.

    Args:
        hidden: (tokens, hidden_size), identical on ranks that shard the vocabulary.
        weight: (vocab, hidden_size), weight matrix of the head; a DTensor if the vocabulary is sharded.
        targets: (tokens,) int64; negative targets are replaced by 0 and should have weight 0.
        weights: (tokens,) float32.
        z_loss_coefficient: see PaLM (Chowdhery et al., 2022, section 5).
        finds_correct: also return whether the argmax of the logits equals the target.
        softcap: replace logits by softcap x tanh(logits / softcap), which adds 4 bytes per logit of a tile; None for no
            cap.
        tile_tokens: tokens projected at a time; 0 chooses a fast value.

    Returns:
        The loss, () float32, the only differentiable output; the log-probabilities of the targets and the log-sum-exps,
        (tokens,) float32 each; and whether the argmax equals the target, (tokens,) bool, or (0,) if not requested.
    """
    weight, shard = VocabularyShard.of(weight)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    tile = tile_tokens or _tile_tokens(device, weight.shape[0])
    settings = _Settings(z_loss_coefficient, finds_correct, softcap, tile, dtype, torch.is_grad_enabled(), shard)
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _ProjectedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets.clamp(min=0), weights, settings
    )
    return outputs


@dataclass(frozen=True)
class _Settings:
    """Settings of `_ProjectedLoss`; the first three are arguments of `projected_loss`.

    Attributes:
        tile_tokens: tokens projected at a time.
        dtype: dtype of the matrix products.
        has_backward: whether the caller records gradients.
        shard: this rank's shard of the vocabulary; None if the rank has the whole vocabulary.
    """

    z_loss_coefficient: float
    finds_correct: bool
    softcap: float | None
    tile_tokens: int
    dtype: torch.dtype
    has_backward: bool
    shard: VocabularyShard | None

    @property
    def exact(self) -> torch.dtype:
        """Dtype of logits and sums: `dtype`, but at least float32."""
        return torch.promote_types(self.dtype, torch.float32)


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = (settings.has_backward and needs_grad for needs_grad in ctx.needs_input_grad[:2])
        shard, exact, z_loss_coefficient = settings.shard, settings.exact, settings.z_loss_coefficient
        head = weight.to(settings.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        log_prob, logsumexp = (hidden.new_empty(len(targets), dtype=exact) for _ in range(2))
        correct = targets.new_empty(len(targets) if settings.finds_correct else 0, dtype=torch.bool)
        tile = _Tile(head, len(targets), settings, has_grad=needs_hidden or needs_weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), settings.tile_tokens):
                rows = slice(start, start + settings.tile_tokens)
                states, target = hidden[rows].to(settings.dtype), targets[rows, None]
                logits = tile.project(states)
                if settings.finds_correct:
                    predictions = logits.argmax(-1, keepdim=True) if shard is None else shard.argmax(logits)
                    correct[rows] = predictions.eq(target)[:, 0]
                softmax = _exponentiate_(logits, target, shard)
                log_prob[rows], logsumexp[rows] = softmax.log_prob, softmax.logsumexp
                if not (needs_hidden or needs_weight):
                    continue
                factors = weights[rows] * (1 + 2 * z_loss_coefficient * logsumexp[rows])
                grad = tile.product_grad_(softmax.loss_grad_(weights[rows], factors))
                if grad_hidden is not None:
                    grad_hidden[rows] = grad @ head
                if grad_weight is not None:
                    _add_product(grad_weight, grad.T, states)
        if shard is not None and grad_hidden is not None:
            shard.sum_(grad_hidden)
        loss = (weights * (z_loss_coefficient * logsumexp.square() - log_prob)).sum()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(log_prob, logsumexp, correct)
        return loss, log_prob, logsumexp, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype)
        grad_weight = None if grad_weight is None else grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


class _Tile:
    """Memory for the logits of one tile of tokens, and their computation from hidden states.

    It is allocated once. A buffer per tile would still exist while the next tile's buffers are allocated.

    Args:
        head: (vocab, hidden_size), in the dtype of the matrix products.
        num_tokens: tokens of all tiles.
        settings: settings of the loss.
        has_grad: whether gradients of the logits are computed.
    """

    def __init__(self, head: Tensor, num_tokens: int, settings: _Settings, *, has_grad: bool) -> None:
        self._head, self._softcap = head, settings.softcap
        self._products = head.new_empty(min(settings.tile_tokens, num_tokens), len(head))
        is_exact = settings.dtype is settings.exact
        self._logits = self._products if is_exact else torch.empty_like(self._products, dtype=settings.exact)
        self._slopes = None if self._softcap is None or not has_grad else torch.empty_like(self._logits)

    def project(self, states: Tensor) -> Tensor:
        """Return the capped logits of states: (tokens, hidden_size); the next call overwrites them."""
        product = torch.mm(states, self._head.T, out=self._products[: len(states)])
        logits = product if self._logits is self._products else self._logits[: len(states)].copy_(product)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_()
            if self._slopes is not None:  # of the capped logits, 1 - tanh²
                torch.mul(logits, logits, out=self._slopes[: len(states)]).neg_().add_(1.0)
            logits.mul_(self._softcap)
        return logits

    def product_grad_(self, grad: Tensor) -> Tensor:
        """Return the gradient of the matrix product, given that of the capped logits, which is overwritten."""
        if self._slopes is not None:
            grad.mul_(self._slopes[: len(grad)])
        return grad if self._logits is self._products else self._products[: len(grad)].copy_(grad)


class _Softmax(NamedTuple):
    """Softmax of a tile's logits before its division.

    Attributes:
        exponentials: (tokens, vocab), exp(logits - maximum), in the memory of the logits.
        sums: (tokens,), their sums over the whole vocabulary.
        log_prob: (tokens,), log-probabilities of the targets.
        logsumexp: (tokens,).
        target: (tokens, 1) int64, columns of the targets, 0 for targets that another rank holds.
        is_own: (tokens, 1) bool, whether this rank holds the target; None if it has the whole vocabulary.
    """

    exponentials: Tensor
    sums: Tensor
    log_prob: Tensor
    logsumexp: Tensor
    target: Tensor
    is_own: Tensor | None

    def loss_grad_(self, weights: Tensor, factors: Tensor) -> Tensor:
        """Replace the exponentials by factors x softmax - weights x one-hot targets; both are (tokens,)."""
        grad = self.exponentials.mul_((factors / self.sums)[:, None])
        target_grads = -weights[:, None].to(grad.dtype)
        return grad.scatter_add_(-1, self.target, target_grads if self.is_own is None else target_grads * self.is_own)


def _exponentiate_(logits: Tensor, target: Tensor, shard: VocabularyShard | None) -> _Softmax:
    """Exponentiate logits: (tokens, vocab) in place; target: (tokens, 1) int64.

    On a CPU, allocating memory would take longer than the sums, and `log_softmax` longer than this whole computation.
    """
    highest = logits.amax(-1, keepdim=True)
    is_own = None
    if shard is not None:
        highest = shard.highest_(highest)
        target, is_own = shard.find(target)
    target_logits = logits.sub_(highest).gather(-1, target)[:, 0]
    sums = logits.exp_().sum(-1)
    if shard is not None and is_own is not None:
        target_logits, sums = shard.sum_(torch.stack((target_logits.where(is_own[:, 0], 0.0), sums)))
    log_sums = sums.log()
    return _Softmax(logits, sums, target_logits - log_sums, highest[:, 0] + log_sums, target, is_own)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of left and right to `total`, of the same or a wider dtype, in place."""
    if total.dtype is left.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        _add_wider(total, left @ right)


def _add_wider(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total`, of a wider dtype, in place.

    On a CPU `part` is added in chunks, because a single addition would first convert all of `part`.
    """
    rows = _CPU_ROWS if total.device.type == "cpu" else len(total)
    for total_rows, part_rows in zip(torch.split(total, rows), torch.split(part, rows), strict=True):
        total_rows.add_(part_rows)
