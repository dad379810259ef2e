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
        tail: the total probability of these tokens is one additional entry of both distributions.
        renormalize: these tokens are removed from both distributions, which are renormalized.
        zero: they are removed from the teacher's distribution, which is renormalized; the student's is unchanged.
    """

    tail = "tail"
    renormalize = "renormalize"
    zero = "zero"


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Settings of the teacher and of the distillation loss."""

    mode: DistillationMode = setting(
        DistillationMode.offline,
        "offline: train on the tokens of the data; on_policy: train on completions of the data's prompts that the "
        "student generates",
    )
    teacher: str = setting(
        "???",
        "run directory or transformers folder of the teacher",
        path=True,
    )
    teacher_which: str = setting("last", "checkpoint of the teacher's run: last, best, or the number of a step")
    teacher_trust: bool = setting(False, "run the code of a teacher model that is not part of foundry")
    vocab_size: int = setting(
        "${model.vocab_size}", "vocabulary size of the student, which must equal the teacher's", ge=1
    )
    max_seq_len: int = setting("${model.max_seq_len}", "maximum sequence length in tokens", ge=1)
    divergence: Divergence = setting(
        Divergence.forward,
        "forward: KL(teacher || student); reverse: KL(student || teacher); mixed: weighted mean of both; jsd: "
        "generalized Jensen-Shannon divergence",
    )
    mixed_kl_weight: float = setting(0.5, "weight of the forward divergence in divergence=mixed", ge=0, le=1)
    jsd_beta: float = setting(0.5, "weight of the teacher in the mixture distribution of divergence=jsd", gt=0, lt=1)
    temperature: float = setting(
        1.0,
        "divisor of both models' logits; the divergence is multiplied by its square",
        gt=0,
    )
    ce_ratio: float | None = setting(
        None,
        "weight of the cross-entropy in the loss; the divergence has the rest; null: 0.5, and 0 with mode=on_policy, "
        "which has no reference answers",
        ge=0,
        le=1,
    )
    top_k: int | None = setting(
        None,
        "compare only this many of the teacher's most likely tokens, which saves memory",
        ge=1,
    )
    outside_top_k: OutsideTopK = setting(
        OutsideTopK.tail,
        "tokens outside the top k: tail: combine them into one entry; renormalize: remove them; zero: set the "
        "teacher's probability to zero",
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
            message = (
                f"is {self.ce_ratio:g} but with objective.mode=on_policy there are no reference answers to train on"
            )
            yield Violation("objective.ce_ratio", f"{message}; leave it out, or set objective.mode=offline")
        for name, requirement, is_used in (
            ("mixed_kl_weight", "objective.divergence=mixed", self.divergence is Divergence.mixed),
            ("jsd_beta", "objective.divergence=jsd", self.divergence is Divergence.jsd),
            ("outside_top_k", "objective.top_k", self.top_k is not None),
        ):
            if not is_used:
                yield from check_unused(self, "objective", [name], requirement)
