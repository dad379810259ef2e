"""Knowledge distillation: a student learns the next-token distributions of a teacher."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import LossSum, Mean, Microbatch
from foundry.models.attention.branches import takes_branches
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.objectives.next_token import valid_targets
from foundry.objectives.unpacking import document_keywords
from foundry.tasks.post_training.objectives.divergence import TeacherLogProbs, divergence_from, keep_teacher
from foundry.tasks.post_training.protocols import Prepared, Rollout, RolloutObjective
from foundry.tasks.post_training.schemas.objective import Distillation as DistillationSettings
from foundry.tasks.post_training.teacher import KEYS, resolve_teacher

_TEACHER = "teacher"


class Distillation(RolloutObjective):
    """Cross-entropy plus divergence from a teacher at the same targets (Hinton et al., 2015).

    A microbatch holds `tokens` and `targets`: (batch, seq) int64, targets -100 where ignored, and `position`; for
    packed rows also `documents`: (batch, seq) int64, index of each token's sample, -1 for padding. The loss of a token
    is ce_ratio x cross-entropy + (1 - ce_ratio) x temperature² x divergence. On policy (Agarwal et al., 2023) the
    targets are tokens sampled from the student: ce_ratio is 0, no gradient flows through the sampling, and the
    cross-entropy term is reported as `entropy`.
    """

    reads_log_probs = True
    forward_keywords = ("read", "per_token")
    metrics: tuple[str, ...] = from_settings()

    @configured_by(DistillationSettings)
    def __init__(self, settings: DistillationSettings) -> None:
        self.settings = settings
        # `recorded_models` stays empty: the teacher is called in each update, but not during generation.
        self.rollouts = settings if settings.generates else None

    @cached_property
    def frozen_models(self) -> Mapping[str, Any]:  # type: ignore[override] # resolved when a run starts
        """Configuration of the teacher model under the name `teacher`.

        Raises:
            ConfigError: the teacher does not exist, is not trusted, or does not fit the student.
        """
        s = self.settings
        sizes = {"vocab_size": s.vocab_size, "max_seq_len": s.max_seq_len}
        return {_TEACHER: resolve_teacher(self._folder, s.teacher_which, s.teacher_trust, sizes)}

    @property
    def shares_prompts(self) -> bool:  # type: ignore[override] # depends on the teacher
        """True if the teacher supports rows in which the completions of a prompt share its tokens."""
        return takes_branches(self._teacher)

    @property
    def _folder(self) -> Path:
        return Path(self.settings.teacher).expanduser()

    def compare(self, frozen: Mapping[str, nn.Module]) -> None:
        """Set the teacher model."""
        self._teacher = frozen[_TEACHER]

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of targets that are not ignored, in samples that are not padding."""
        return int((valid_targets(microbatch) != IGNORED_TARGET).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the sum of the loss over valid tokens.

        The student's full logits never exist at once; with `top_k` the teacher's do not either.

        Raises:
            ConfigError: the teacher has another vocabulary size.
        """
        tokens, targets = microbatch["tokens"], valid_targets(microbatch)
        packed = document_keywords(self._teacher, microbatch)
        with torch.no_grad():
            teacher_values = self._teacher(tokens, targets, read=self._read_teacher, **packed).read
        packed = document_keywords(model, microbatch)
        output = model(tokens, targets, read=self._read_student, per_token=tuple(teacher_values.values()), **packed)
        cross_entropy = -output.log_prob.sum()
        divergence = output.read["divergence"].sum()
        share = self.settings.cross_entropy_share
        loss = share * cross_entropy + (1 - share) * self.settings.temperature**2 * divergence
        means = (Mean(cross_entropy.detach()), Mean(divergence.detach()))
        return LossSum(loss, dict(zip(self.settings.metrics, means, strict=True)))

    def prepare(self, rollout: Rollout) -> Prepared:
        """Return no columns, or with `overlong_filtering` `targets`, which ignore truncated completions."""
        if not self.settings.overlong_filtering:
            return Prepared({})
        return Prepared({"targets": rollout.targets.masked_fill(rollout.is_truncated[:, None], IGNORED_TARGET)})

    def _read_teacher(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return log-probabilities (and tokens with `top_k`) of the teacher to keep, from (tokens, vocab) logits."""
        self._num_entries = logits.shape[-1]
        teacher = keep_teacher(logits, self.settings)
        return {"log_prob": teacher.log_prob} | ({} if teacher.tokens is None else {"tokens": teacher.tokens})

    def _read_student(
        self, logits: Tensor, targets: Tensor, log_prob: Tensor, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the divergence between teacher and student at each token, (tokens,); 0 at ignored targets."""
        if logits.shape[-1] != self._num_entries:
            message = (
                f"is {self._folder}, whose model has {self._num_entries} tokens and the student {logits.shape[-1]}"
            )
            raise ConfigError(Violation(KEYS.path, f"{message}; both need the same"))
        values = divergence_from(TeacherLogProbs(log_prob, tokens), logits, self.settings)
        return {"divergence": values.masked_fill(targets == IGNORED_TARGET, 0.0)}
