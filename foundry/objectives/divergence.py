"""How far a student's next-token distribution is from its teacher's."""

import math

import torch
from torch import Tensor

from foundry.config.schemas.objective import Divergence, OutsideTopK

_LOG_ZERO = -100.0
"""The logarithm of the probability that the teacher gives what `OutsideTopK.zero` leaves out."""


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: Divergence = Divergence.forward,
    temperature: float = 1.0,
    mixed_kl_weight: float = 0.5,
    jsd_beta: float = 0.5,
    top_k: int | None = None,
    outside_top_k: OutsideTopK = OutsideTopK.tail,
) -> Tensor:
    """Divergence of each position's distributions, summed over the vocabulary and not multiplied by temperature².

    forward is KL(teacher ‖ student), reverse is KL(student ‖ teacher), mixed is a weighted sum of both, and jsd the
    generalised Jensen-Shannon divergence (Agarwal et al., 2023, equation 1): with m = β teacher + (1 - β) student,
    β KL(teacher ‖ m) + (1 - β) KL(student ‖ m).

    Args:
        student_logits: (..., vocab), floating point; the result has their dtype.
        teacher_logits: (..., vocab).
        kind: which divergence.
        temperature: both distributions are softmax(logits / temperature).
        mixed_kl_weight: weight of forward in mixed; reverse has the rest.
        jsd_beta: weight β of the teacher, between 0 and 1 exclusively.
        top_k: the teacher's likeliest tokens that are compared; None: all.
        outside_top_k: what becomes of the others.

    Returns:
        (...), never negative but for rounding, and 0 where the distributions are equal, except with
        `OutsideTopK.zero`, whose teacher is cut off while the student is not.
    """
    student, teacher = ((logits / temperature).log_softmax(-1) for logits in (student_logits, teacher_logits))
    if top_k is not None and top_k < teacher.shape[-1]:
        student, teacher = _cut(student, teacher, top_k, outside_top_k)
    match kind:
        case Divergence.forward:
            return _kl(teacher, student)
        case Divergence.reverse:
            return _kl(student, teacher)
        case Divergence.mixed:
            return mixed_kl_weight * _kl(teacher, student) + (1 - mixed_kl_weight) * _kl(student, teacher)
        case Divergence.jsd:
            mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
            return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(student, mixture)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first ‖ second) of log-probabilities over the last dimension."""
    return (first.exp() * (first - second)).sum(-1)


def _cut(student: Tensor, teacher: Tensor, top_k: int, outside: OutsideTopK) -> tuple[Tensor, Tensor]:
    """Both log-distributions on the teacher's likeliest tokens and what stands for the others."""
    best, tokens = teacher.topk(top_k, dim=-1)
    match outside:
        case OutsideTopK.renormalize:
            return student.gather(-1, tokens).log_softmax(-1), best.log_softmax(-1)
        case OutsideTopK.zero:
            return student, torch.full_like(teacher, _LOG_ZERO).scatter(-1, tokens, best.log_softmax(-1))
        case OutsideTopK.tail:
            is_kept = torch.zeros_like(teacher, dtype=torch.bool).scatter(-1, tokens, True)
            # A sum of what is left, since 1 - sum would lose the digits of a small rest.
            rest = (log_probs.masked_fill(is_kept, -math.inf).logsumexp(-1, True) for log_probs in (student, teacher))
            student_rest, teacher_rest = rest
            kept = student.gather(-1, tokens)
            return torch.cat([kept, student_rest], -1), torch.cat([best, teacher_rest], -1)
