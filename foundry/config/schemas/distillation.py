"""Settings of knowledge distillation: the teacher and the divergence between teacher and student."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from foundry.config.setting import check_unused, setting
from foundry.core.errors import Violation


class DistillationMode(Enum):
    """Source of the tokens at which student and teacher are compared.

    Attributes:
        offline: tokens of the dataset.
        on_policy: tokens that the student generates as completions of the dataset's prompts.
    """

    offline = "offline"
    on_policy = "on_policy"


class Divergence(Enum):
    """Divergence between the next-token distributions of teacher and student."""

    forward = "forward"
    reverse = "reverse"
    mixed = "mixed"
    jsd = "jsd"


class OutsideTopK(Enum):
    """Treatment of the tokens outside the teacher's top k.

    Attributes:
        tail: their total probability is one additional entry of both distributions.
        renormalize: they are removed from both distributions, which are renormalized.
        zero: the teacher's probability of them is set to zero; the student's is unchanged.
    """

    tail = "tail"
    renormalize = "renormalize"
    zero = "zero"


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Settings of the teacher and of the distillation loss."""

    mode: DistillationMode = setting(
        DistillationMode.offline,
        "offline: learn at the tokens of the data; on_policy: at answers to the data's prompts that the student draws "
        "itself",
    )
    teacher: str = setting(
        "???",
        "run directory, or folder of transformers, of the model to learn from",
        path=True,
    )
    teacher_which: str = setting("last", "checkpoint of that run: last, best, or the number of a step")
    teacher_trust: bool = setting(False, "build a model that the run names and foundry does not know: it runs its code")
    vocab_size: int = setting("${model.vocab_size}", "entries of the student, which the teacher must have too", ge=1)
    max_seq_len: int = setting("${model.max_seq_len}", "longest sequence in tokens", ge=1)
    divergence: Divergence = setting(
        Divergence.forward,
        "forward: KL(teacher || student); reverse: KL(student || teacher); mixed: both, weighted; or jsd",
    )
    mixed_kl_weight: float = setting(0.5, "share of forward in mixed", ge=0, le=1)
    jsd_beta: float = setting(0.5, "weight of the teacher in the mixture of jsd", gt=0, lt=1)
    temperature: float = setting(
        1.0,
        "both models' logits are divided by it; the divergence is multiplied by its square",
        gt=0,
    )
    ce_ratio: float | None = setting(
        None,
        "share of the cross-entropy in the loss; the divergence has the rest; null: 0.5, and 0 with mode=on_policy, "
        "which knows no right answers",
        ge=0,
        le=1,
    )
    top_k: int | None = setting(
        None,
        "compare the teacher's likeliest tokens only, which saves memory",
        ge=1,
    )
    outside_top_k: OutsideTopK = setting(
        OutsideTopK.tail,
        "the other tokens: tail: one entry together; renormalize: left out; zero: nothing for the teacher only",
    )

    @property
    def cross_entropy_share(self) -> float:
        """Weight of the cross-entropy in the loss: `ce_ratio`, or the default of the mode."""
        if self.ce_ratio is not None:
            return self.ce_ratio
        return 0.0 if self.mode is DistillationMode.on_policy else 0.5

    def check_teaching(self) -> Iterator[Violation]:
        """Check that no setting of the loss would be ignored."""
        is_on_policy = self.mode is DistillationMode.on_policy
        if is_on_policy and self.ce_ratio:
            message = f"is {self.ce_ratio:g} but with objective.mode=on_policy there are no right answers to learn"
            yield Violation("objective.ce_ratio", f"{message}; leave it out, or set objective.mode=offline")
        for name, needed, is_used in (
            ("mixed_kl_weight", "objective.divergence=mixed", self.divergence is Divergence.mixed),
            ("jsd_beta", "objective.divergence=jsd", self.divergence is Divergence.jsd),
            ("outside_top_k", "objective.top_k", self.top_k is not None),
        ):
            if not is_used:
                yield from check_unused(self, "objective", [name], needed)
