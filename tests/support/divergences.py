"""Divergence of a student from its teacher, computed from their logits."""

from foundry.tasks.post_training.objectives.divergence import divergence_from, keep_teacher
from foundry.tasks.post_training.schemas.distillation import Teaching


def divergence(student_logits, teacher_logits, **options):
    """Return the divergence at each position, (...); options are fields of `Teaching`."""
    settings = Teaching(teacher="unused", vocab_size=student_logits.shape[-1], max_seq_len=1, **options)
    return divergence_from(keep_teacher(teacher_logits, settings), student_logits, settings)
