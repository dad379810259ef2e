"""`objective=`: preferences, distillation and reinforcement learning."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from foundry.config.schemas.peft import LoRA
from foundry.config.setting import check_unused, setting
from foundry.core.errors import Violation
from foundry.tasks.post_training.schemas.distillation import DistillationMode, Teaching
from foundry.tasks.post_training.schemas.policy import PolicyGradient
from foundry.tasks.post_training.schemas.rollouts import Rollouts

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


class PreferenceLoss(Enum):
    """Loss as a function of the margin between the chosen and the rejected response."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"


class Reference(Enum):
    """Implementation of the reference model, which has the initial weights of the run.

    Attributes:
        auto: adapters_off with adapters, otherwise cached.
        cached: two log-probabilities per pair, computed once before the first step and stored in the run directory.
        copy: a second model in memory, evaluated at each step.
        adapters_off: the trained model with its adapters disabled, evaluated at each step.
    """

    auto = "auto"
    cached = "cached"
    copy = "copy"
    adapters_off = "adapters_off"


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation: makes chosen responses more likely than rejected ones."""

    implies_hparams: ClassVar[str] = "dpo"
    wants: ClassVar[frozenset[str]] = frozenset({"pairs"})
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    metrics: ClassVar[tuple[str, ...]] = (
        "preference_loss",
        "sft_loss",
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_log_prob",
    )

    _target_: str = "foundry.DPO"
    ref_policy_kl_penalty: float = setting(
        0.05,
        "β: strength of the pull toward the reference model, which has the initial weights of the run",
        gt=0,
    )
    loss_type: PreferenceLoss = setting(
        PreferenceLoss.sigmoid, "loss as a function of the margin between the responses: sigmoid, ipo or hinge"
    )
    label_smoothing: float = setting(0.0, "assumed fraction of pairs whose order is wrong", ge=0, lt=0.5)
    preference_loss_weight: float = setting(1.0, "weight of the preference loss", ge=0)
    sft_loss_weight: float = setting(
        0.0,
        "weight of the negative log-probability of the chosen response, which otherwise can become less likely",
        ge=0,
    )
    preference_average_log_probs: bool = setting(
        False, "divide log-ratios by the length of the response; intended for loss_type=ipo"
    )
    sft_average_log_probs: bool = setting(
        False,
        "divide the negative log-probability by the length of the response, so that all responses have equal weight",
    )
    reference: Reference = setting(
        Reference.auto,
        "reference model: cached: log-probabilities of all pairs, computed once before the first step; copy: a "
        "second model, evaluated at each step; adapters_off: the model with its adapters disabled; auto: "
        "adapters_off with adapters, else cached",
    )

    def check(self) -> Iterator[Violation]:
        """Check that the loss has a term with a nonzero weight."""
        if self.preference_loss_weight == self.sft_loss_weight == 0:
            message = "is 0 and so is objective.sft_loss_weight; set one of them above 0"
            yield Violation("objective.preference_loss_weight", message)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that reference=adapters_off is used with adapters."""
        if self.reference is Reference.adapters_off and not isinstance(run.peft, LoRA):
            message = "is adapters_off but peft=none trains the model itself; choose cached or copy, or peft=lora"
            yield Violation("objective.reference", message)


@dataclass(frozen=True, kw_only=True)
class Distillation(Rollouts, Teaching):
    """Divergence from a teacher's next-token distribution, on tokens of the data or of the student's completions."""

    implies_hparams: ClassVar[str] = "distillation"
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)

    _target_: str = "foundry.Distillation"

    @property
    def generates(self) -> bool:
        """True if the student trains on its own completions."""
        return self.mode is DistillationMode.on_policy

    @property
    def described(self) -> str:
        """Name of the objective in messages."""
        return f"Distillation with mode={self.mode.value}"

    @property
    def wants(self) -> frozenset[str]:
        """Required contents of a sample."""
        return frozenset({"prompts"} if self.generates else {"tokens", "sequences"})

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are computed in addition to the loss."""
        return ("entropy" if self.generates else "cross_entropy", "divergence")

    def check(self) -> Iterator[Violation]:
        """Check that the rollout of mode=on_policy is valid, and that no setting would be ignored."""
        yield from self.check_teaching()
        if self.generates:
            yield from self.check_rollout()
        else:
            names = [item.name for item in fields(Rollouts)]
            yield from check_unused(self, "objective", names, "objective.mode=on_policy")


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation: makes completions with above-average rewards in their group more likely."""

    implies_hparams: ClassVar[str] = "grpo"

    _target_: str = "foundry.GRPO"
