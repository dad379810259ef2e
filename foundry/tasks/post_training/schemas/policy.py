"""Settings of policy-gradient objectives, which train on completions of the model itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from foundry.config.setting import check_unused, setting
from foundry.core.errors import Violation
from foundry.tasks.post_training.schemas.rollouts import Rollouts


class KLType(Enum):
    """Estimator of the KL divergence from sampled tokens (Schulman's k1, k2 and k3)."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLGradient(Enum):
    """Weight of the KL estimate, which determines its gradient.

    Attributes:
        score: 1, with the gradient of the token's probability (score function).
        ratio: the token's probability divided by its probability before the rollout's first update.
        none: 1, without a gradient.
    """

    score = "score"
    ratio = "ratio"
    none = "none"


class ImportanceWeights(Enum):
    """Treatment of the importance weights that correct for differences between sampler and trainer.

    Attributes:
        plain: used unchanged.
        tis: clamped to the bounds (truncated importance sampling).
        icepop: tokens with weights out of bounds are masked.
        seq_mask: sequences whose geometric mean weight is out of bounds are masked.
    """

    plain = "plain"
    tis = "tis"
    icepop = "icepop"
    seq_mask = "seq_mask"


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Rollouts):
    """Settings of the rollout, of the baseline of its advantages, and of the policy-gradient loss."""

    needs_rewards: ClassVar[bool] = True
    wants: ClassVar[frozenset[str]] = frozenset({"prompts"})
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    normalize_rewards: bool = setting(True, "divide advantages by the standard deviation of the rewards in their group")
    use_rloo: bool = setting(
        True,
        "baseline of a completion: the mean reward of the remaining completions of its prompt; false: of all of them",
    )
    ratio_clip_min: float = setting(0.2, "clip probability ratios below 1 - this; 1: no lower clipping", ge=0, le=1)
    ratio_clip_max: float = setting(0.2, "clip probability ratios above 1 + this", ge=0)
    ratio_clip_c: float | None = setting(
        None, "maximum loss of a negative advantage A in units of |A| (dual clip), such as 3; null: no maximum", gt=1
    )
    ref_policy_kl_penalty: float = setting(
        0.01,
        "β: weight of the KL divergence from the reference model, which has the initial weights of the run; 0: no "
        "reference model",
        ge=0,
    )
    token_level_loss: bool = setting(
        True, "average the loss over all tokens; false: over the tokens of each completion, then over completions"
    )
    use_on_policy_kl_approximation: bool = setting(
        False, "weight the KL divergence by the policy's probability divided by the sampler's"
    )
    use_importance_sampling_correction: bool = setting(
        False, "weight the loss by the trainer's probability divided by the sampler's, at the rollout"
    )
    logprob_chunk_size: int | None = setting(
        1024,
        "tokens whose logits are computed at a time, and again in the backward pass; null: the model's own setting",
        ge=1,
        le=10**12,
    )
    kl_type: KLType = setting(KLType.k3, "estimator of the KL divergence: k1, k2 or k3")
    kl_input_clamp: float | None = setting(20.0, "maximum log-ratio in the KL estimate; null: no limit", gt=0)
    kl_output_clamp: float | None = setting(10.0, "maximum KL estimate; null: no limit", gt=0)
    kl_gradient: KLGradient = setting(
        KLGradient.score,
        "weight of the KL estimate: score: 1, with the gradient of the token's probability; ratio: the probability "
        "ratio; none: 1, without that gradient",
    )
    use_kl_in_reward: bool = setting(
        False, "subtract the KL divergence from the rewards instead of adding it to the loss"
    )
    sequence_level_importance_ratios: bool = setting(
        False, "one ratio per completion, the geometric mean of the ratios of its tokens (GSPO)"
    )
    disable_ppo_ratio: bool = setting(False, "use the log-probability in place of the ratio (REINFORCE)")
    force_on_policy_ratio: bool = setting(False, "set the ratio to 1, but keep its gradient")
    use_cispo: bool = setting(
        False, "weight log-probabilities by the clipped ratio, without the gradient of the ratio (CISPO)"
    )
    importance_weights: ImportanceWeights = setting(
        ImportanceWeights.plain,
        "treatment of the importance weights of the correction: plain, tis (clamped), icepop or seq_mask",
    )
    importance_weight_min: float | None = setting(None, "lower bound of the importance weights; null: 0", ge=0)
    importance_weight_max: float | None = setting(None, "upper bound of the importance weights; null: none", gt=0)
    positive_example_nll_weight: float = setting(
        0.0, "weight of the negative log-probability of completions with a reward above 0", ge=0
    )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are computed in addition to the loss."""
        names = ("policy_loss", "ratio", "clipped", "mult_prob_error", "sampler_kl", "entropy")
        has_kl = self.ref_policy_kl_penalty > 0 and not self.use_kl_in_reward
        has_nll = self.positive_example_nll_weight > 0
        return (*names, *(("kl",) if has_kl else ()), *(("positive_nll",) if has_nll else ()))

    def check(self) -> Iterator[Violation]:
        """Check that prompts have several completions, the rollout is valid, and no setting would be ignored."""
        if self.num_generations_per_prompt == 1:
            message = "is 1, so completions are not compared and nothing is learned; set at least 2, better 8"
            yield Violation("objective.num_generations_per_prompt", message)
        yield from self.check_rollout()
        ratios = ("use_cispo", "force_on_policy_ratio", "disable_ppo_ratio")
        if len(ratios_set := [name for name in ratios if getattr(self, name)]) > 1:
            yield Violation(
                f"objective.{ratios_set[1]}", f"is set together with objective.{ratios_set[0]}; choose one of them"
            )
        if self.force_on_policy_ratio and self.updates_per_rollout > 1:
            message = "is true but only the first of several updates_per_rollout has ratio 1; set it to false"
            yield Violation("objective.force_on_policy_ratio", message)
        yield from self._check_unused()

    def _check_unused(self) -> Iterator[Violation]:
        has_kl, corrects = self.ref_policy_kl_penalty > 0, self.use_importance_sampling_correction
        is_loss = has_kl and not self.use_kl_in_reward
        is_bounded = corrects and self.importance_weights is not ImportanceWeights.plain
        has_ratio = not (self.use_cispo or self.force_on_policy_ratio or self.disable_ppo_ratio)
        weighs_kl = is_loss and not self.use_on_policy_kl_approximation
        for names, requirement, is_used in (
            (
                ("kl_type", "kl_input_clamp", "kl_output_clamp", "use_kl_in_reward"),
                "objective.ref_policy_kl_penalty above 0",
                has_kl,
            ),
            (("use_on_policy_kl_approximation",), "a KL penalty in the loss", is_loss),
            (("kl_gradient",), "a KL penalty in the loss, without use_on_policy_kl_approximation", weighs_kl),
            (("importance_weights",), "use_importance_sampling_correction", corrects),
            (("importance_weight_min", "importance_weight_max"), "importance_weights other than plain", is_bounded),
            (("ratio_clip_min", "ratio_clip_max"), "a clipped ratio", has_ratio or self.use_cispo),
        ):
            if not is_used:
                yield from check_unused(self, "objective", names, requirement)
