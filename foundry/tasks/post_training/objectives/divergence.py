"""Divergence between the next-token distributions of a student and its teacher."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry.tasks.post_training.schemas.distillation import Divergence, OutsideTopK, Teaching

_LOG_ZERO = -100.0
"""Log-probability assigned to the tokens that `OutsideTopK.zero` excludes from the teacher's distribution."""


@dataclass(frozen=True)
class TeacherLogProbs:
    """A teacher's distribution, possibly truncated to its top k tokens.

    Attributes:
        log_prob: (..., vocab), or (..., top_k) if `tokens` is set; `OutsideTopK.tail` adds an entry for the remaining
            probability.
        tokens: (..., top_k) int64, the most likely tokens; None if all tokens are kept.
    """

    log_prob: Tensor
    tokens: Tensor | None = None


def keep_teacher(logits: Tensor, settings: Teaching) -> TeacherLogProbs:
    """Return the part of softmax(logits / temperature) that `divergence_from` compares; logits: (..., vocab)."""
    log_prob = (logits / settings.temperature).log_softmax(-1)
    if settings.top_k is None or settings.top_k >= log_prob.shape[-1]:
        return TeacherLogProbs(log_prob)
    best, tokens = log_prob.topk(settings.top_k, dim=-1)
    if settings.outside_top_k is OutsideTopK.tail:
        return TeacherLogProbs(torch.cat([best, _rest(log_prob, tokens)], -1), tokens)
    return TeacherLogProbs(best.log_softmax(-1), tokens)


def divergence_from(teacher: TeacherLogProbs, student_logits: Tensor, settings: Teaching) -> Tensor:
    """Return the divergence at each position, summed over the vocabulary and not multiplied by temperature².

    forward is KL(teacher ‖ student), reverse is KL(student ‖ teacher), mixed is a weighted mean of both, and jsd the
    generalized Jensen-Shannon divergence (Agarwal et al., 2023, equation 1): with β = jsd_beta and m = β teacher + (1 -
    β) student, β KL(teacher ‖ m) + (1 - β) KL(student ‖ m).

    Args:
        teacher: output of `keep_teacher` with the same settings.
        student_logits: (..., vocab), floating point; the result has the same dtype.
        settings: divergence settings.

    Returns:
        (...), non-negative up to rounding, and 0 if the distributions are equal, except with `OutsideTopK.zero`, which
        truncates the teacher but not the student.
    """
    student, teacher_log_probs = (student_logits / settings.temperature).log_softmax(-1), teacher.log_prob
    if (tokens := teacher.tokens) is not None:
        match settings.outside_top_k:
            case OutsideTopK.tail:
                student = torch.cat([student.gather(-1, tokens), _rest(student, tokens)], -1)
            case OutsideTopK.renormalize:
                student = student.gather(-1, tokens).log_softmax(-1)
            case OutsideTopK.zero:
                teacher_log_probs = torch.full_like(student, _LOG_ZERO).scatter(
                    -1, tokens, teacher_log_probs.to(student.dtype)
                )
    match settings.divergence:
        case Divergence.forward:
            return _kl(teacher_log_probs, student)
        case Divergence.reverse:
            return _kl(student, teacher_log_probs)
        case Divergence.mixed:
            weight = settings.mixed_kl_weight
            return weight * _kl(teacher_log_probs, student) + (1 - weight) * _kl(student, teacher_log_probs)
        case Divergence.jsd:
            beta = settings.jsd_beta
            mixture = torch.logaddexp(teacher_log_probs + math.log(beta), student + math.log1p(-beta))
            return beta * _kl(teacher_log_probs, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first ‖ second) of log-probabilities over the last dimension."""
    return (first.exp() * (first - second)).sum(-1)


def _rest(log_prob: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of all tokens outside `tokens`, (..., 1).

    It is a sum over these tokens, because 1 minus the sum over `tokens` would lose the digits of a small value.
    """
    is_top_k = torch.zeros_like(log_prob, dtype=torch.bool).scatter(-1, tokens, True)
    return log_prob.masked_fill(is_top_k, -math.inf).logsumexp(-1, keepdim=True)
