"""Distillation: a student learns the distribution of a teacher, token by token."""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.schemas.distillation import (
    DistillationMode,
    Divergence,
    OutsideTopK,
    distillation_metrics,
    resolve_ce_ratio,
)
from foundry.config.teacher import KEYS, resolve_teacher
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import LossSum, Mean, Microbatch
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.objectives.divergence import TeacherLogProbs, divergence_from, keep_teacher
from foundry.objectives.next_token import valid_targets
from foundry.objectives.rollout import Prepared, Rollout, RolloutSettings
from foundry.objectives.unpacking import document_keywords

_TEACHER = "teacher"


class Distillation:
    """Cross-entropy and divergence from a teacher at the same targets (Hinton et al., 2015).

    A microbatch holds `tokens` and `targets`: (batch, seq) int64, targets -100 where ignored, and `position`; where
    rows hold several samples also `documents`: (batch, seq) int64, the sample of each token, -1 for padding. A token
    costs ce_ratio x cross-entropy + (1 - ce_ratio) x temperature² x divergence. On policy (Agarwal et al., 2023) the
    targets are tokens that the student has drawn itself: ce_ratio is 0, no gradient goes through the drawing, and what
    would be the cross-entropy is measured as `entropy`.

    Args:
        mode: whether a microbatch is of the data or of rollouts.
        teacher: run directory, or folder of transformers; it is read when a run starts.
        teacher_which: checkpoint of that run.
        teacher_trust: whether it may name a model that foundry does not know.
        vocab_size: entries of the student's vocabulary.
        max_seq_len: longest sequence in tokens.
        divergence: which.
        mixed_kl_weight: share of forward in mixed.
        jsd_beta: weight of the teacher in the mixture of jsd.
        temperature: of both distributions.
        ce_ratio: share of the cross-entropy; None: as `resolve_ce_ratio`.
        top_k: the teacher's likeliest tokens that are compared; None: all.
        outside_top_k: what becomes of the others.
        rollouts: as in `RolloutSettings.from_options`, which is read on policy only.
    """

    reads_log_probs = True
    forward_keywords = ("read", "per_token")

    def __init__(
        self,
        *,
        mode: DistillationMode = DistillationMode.offline,
        teacher: str,
        teacher_which: str = "last",
        teacher_trust: bool = False,
        vocab_size: int,
        max_seq_len: int,
        divergence: Divergence = Divergence.forward,
        mixed_kl_weight: float = 0.5,
        jsd_beta: float = 0.5,
        temperature: float = 1.0,
        ce_ratio: float | None = None,
        top_k: int | None = None,
        outside_top_k: OutsideTopK = OutsideTopK.tail,
        **rollouts: Any,
    ) -> None:
        is_on_policy = mode is DistillationMode.on_policy
        # The teacher is asked at each update, and not when answers are generated.
        self.rollouts = RolloutSettings.from_options(**rollouts, needs_rewards=False) if is_on_policy else None
        self.metrics = distillation_metrics(mode)
        self._folder, self._which, self._trust = Path(teacher).expanduser(), teacher_which, teacher_trust
        self._sizes = {"vocab_size": vocab_size, "max_seq_len": max_seq_len}
        self._ce_ratio, self._factor = resolve_ce_ratio(mode, ce_ratio), temperature**2
        self._keep = partial(keep_teacher, temperature=temperature, top_k=top_k, outside_top_k=outside_top_k)
        self._divergence_from = partial(
            divergence_from,
            kind=divergence,
            temperature=temperature,
            mixed_kl_weight=mixed_kl_weight,
            jsd_beta=jsd_beta,
            outside_top_k=outside_top_k,
        )

    @cached_property
    def frozen_models(self) -> Mapping[str, Any]:
        """The teacher, as it was recorded.

        Raises:
            ConfigError: there is none, or it may not be built.
        """
        return {_TEACHER: resolve_teacher(self._folder, self._which, self._trust, self._sizes)}

    def compare(self, frozen: Mapping[str, nn.Module]) -> None:
        """Take the teacher."""
        self._teacher = frozen[_TEACHER]

    def num_valid(self, microbatch: Microbatch) -> int:
        """Number of targets that are not ignored, in samples that are not padding."""
        return int((valid_targets(microbatch) != IGNORED_TARGET).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Sum over the valid tokens; no logits of the student, and with `top_k` none of the teacher's, exist at once.

        Raises:
            ConfigError: the teacher has another vocabulary.
        """
        tokens, targets = microbatch["tokens"], valid_targets(microbatch)
        packed = document_keywords(self._teacher, microbatch)
        with torch.no_grad():
            kept = self._teacher(tokens, targets, read=self._read_teacher, **packed).read
        packed = document_keywords(model, microbatch)
        output = model(tokens, targets, read=self._read_student, per_token=tuple(kept.values()), **packed)
        cross_entropy = -output.log_prob.sum()
        divergence = output.read["divergence"].sum()
        loss = self._ce_ratio * cross_entropy + (1 - self._ce_ratio) * self._factor * divergence
        means = (Mean(cross_entropy.detach()), Mean(divergence.detach()))
        return LossSum(loss, dict(zip(self.metrics, means, strict=True)))

    def record(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Nothing: student and teacher are asked at each update."""
        return {}

    def prepare(self, rollout: Rollout) -> Prepared:
        """The answers as they are, or those alone that ended by themselves."""
        assert self.rollouts is not None
        if not self.rollouts.leaves_out_truncated:
            return Prepared({})
        return Prepared({"targets": rollout.targets.masked_fill(rollout.is_truncated[:, None], IGNORED_TARGET)})

    def example(self, num_samples: int, seq_len: int) -> Microbatch:
        """A microbatch of answers of that length."""
        tokens = torch.zeros(num_samples, seq_len, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens, "position": torch.arange(num_samples)}

    def _read_teacher(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What is kept of (tokens, vocab) logits."""
        self._num_entries = logits.shape[-1]
        teacher = self._keep(logits)
        return {"log_prob": teacher.log_prob} | ({} if teacher.tokens is None else {"tokens": teacher.tokens})

    def _read_student(
        self, logits: Tensor, targets: Tensor, log_prob: Tensor, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """(tokens,), the divergence; 0 at ignored targets."""
        if logits.shape[-1] != self._num_entries:
            message = (
                f"is {self._folder}, whose model has {self._num_entries} tokens and the student {logits.shape[-1]}"
            )
            raise ConfigError(Violation(KEYS.path, f"{message}; both need the same"))
        values = self._divergence_from(TeacherLogProbs(log_prob, tokens), logits)
        return {"divergence": values.masked_fill(targets == IGNORED_TARGET, 0.0)}
