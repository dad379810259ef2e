"""Group-relative policy optimization: raises the likelihood of completions that score above their group's average."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.core.protocols import LossSum, Mean, Microbatch
from foundry.generation.sampling import filtered
from foundry.models.lora import adapters_off
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.objectives.unpacking import document_keywords, unpack
from foundry.tasks.post_training.objectives.advantages import group_advantages, mean_and_std, penalized_rewards
from foundry.tasks.post_training.objectives.kl import kl_estimate
from foundry.tasks.post_training.objectives.policy_gradient import (
    Completions,
    policy_loss,
    positive_example_nll,
    sampling_mismatch,
)
from foundry.tasks.post_training.protocols import Prepared, Rollout, RolloutObjective
from foundry.tasks.post_training.schemas.objective import GRPO as GRPOSettings

_REFERENCE = "reference"
_MISMATCHES = ("mult_prob_error", "sampler_kl", "entropy")


class GRPO(RolloutObjective):
    """Clipped policy gradient of completions, weighted by their advantages (Shao et al., 2024); see `policy_loss`.

    A microbatch holds `tokens` and `targets`: (completions, seq) int64, targets -100 for prompts and padding,
    `position`, and the columns returned by `prepare`. If completions are packed into rows, tokens, targets and
    `documents` are (rows, seq), and `documents` is the index of each token's completion, -1 for padding. The loss is a
    mean over valid tokens, or over valid completions with token_level_loss=False. Log-probabilities are computed after
    the sampling filters; the KL divergence uses unfiltered ones, and its reference is the model at the start of the
    run. Truncated completions that `overlong_filtering` excludes from the loss remain in the baseline.

    Args:
        has_adapters: whether the model has adapters.
    """

    reads_log_probs = True
    shares_prompts = True
    metrics: tuple[str, ...] = from_settings()

    @configured_by(GRPOSettings)
    def __init__(self, settings: GRPOSettings, *, has_adapters: bool = False) -> None:
        self.settings, self.rollouts = settings, settings
        self._has_reference = settings.ref_policy_kl_penalty > 0
        self._is_within = has_adapters  # then the reference is the model with disabled adapters
        has_copy = self._has_reference and not has_adapters
        self.frozen_models: Mapping[str, Any] = {_REFERENCE: None} if has_copy else {}
        self.recorded_models = tuple(self.frozen_models)
        self._filters: dict[str, Any] = {
            "temperature": settings.generation_temperature,
            "top_k": settings.generation_top_k,
            "top_p": settings.generation_top_p,
        }
        self._is_filtered = self._filters != {"temperature": 1, "top_k": None, "top_p": 1}
        self.forward_keywords = ("read",) if self._is_filtered else ()

    def compare(self, frozen: Mapping[str, nn.Module]) -> None:
        """Set the reference model; None without KL penalty, or if it is the model with disabled adapters."""
        self._reference = frozen.get(_REFERENCE)

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of valid tokens, or with token_level_loss=False of completions with valid tokens."""
        mask = _loss_mask(microbatch)
        return int((mask if self.settings.token_level_loss else mask.any(-1)).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the sum of the loss with KL penalty over tokens, or over completions as means over their tokens."""
        mask = _loss_mask(microbatch)
        log_prob, unfiltered = self._log_probs(model, microbatch)
        old = microbatch.get("old", log_prob.detach())
        part = Completions(
            log_prob=log_prob,
            old=old,
            sampler=microbatch["sampler"],
            mask=mask,
            advantage=microbatch["advantage"],
            reference=microbatch.get("reference"),
            unfiltered=unfiltered,
        )
        result = policy_loss(part, self.settings)
        loss, is_kept = result.loss, result.is_kept
        count = is_kept.sum()
        clipped = (result.ratio < 1 - self.settings.ratio_clip_min) | (result.ratio > 1 + self.settings.ratio_clip_max)
        metrics = {
            "policy_loss": Mean(result.policy.detach().float()),
            "ratio": Mean(result.ratio.masked_fill(~is_kept, 0.0).sum(), count),
            "clipped": Mean((clipped & is_kept).sum().float(), count),
        }
        mismatch = sampling_mismatch(log_prob.detach(), old, part.sampler, is_kept)
        metrics |= {name: Mean(mismatch[name].float(), count) for name in _MISMATCHES}
        if self._has_reference and not self.settings.use_kl_in_reward:
            metrics["kl"] = Mean(result.kl.detach().float())
        if self.settings.positive_example_nll_weight > 0:
            nll, number = positive_example_nll(log_prob, is_kept, microbatch["reward"])
            # The sum `nll` has another count than `loss`, but the step divides both by the number of valid items.
            scale = microbatch["nll_scale"][:1].sum()  # 0 for a microbatch without completions
            loss = loss + self.settings.positive_example_nll_weight * scale * nll
            metrics["positive_nll"] = Mean(nll.detach().float(), number)
        return LossSum(loss.float(), metrics)

    def record(self, model: nn.Module, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return log-probabilities of the policy if later updates or rewards need them, and of the reference if any."""
        columns = dict[str, Tensor]()
        if self.settings.updates_per_rollout > 1 or self.settings.use_kl_in_reward:
            filtered_log_probs, unfiltered = self._log_probs(model, microbatch)
            if self.settings.updates_per_rollout > 1:
                columns["old"] = filtered_log_probs
            if self.settings.use_kl_in_reward:
                columns["policy"] = filtered_log_probs if unfiltered is None else unfiltered
        if self._has_reference and self._is_within:
            with adapters_off(model):
                columns[_REFERENCE] = _token_log_probs(model, microbatch)
        elif self._has_reference:
            assert self._reference is not None
            columns[_REFERENCE] = _token_log_probs(self._reference, microbatch)
        return columns

    def prepare(self, rollout: Rollout) -> Prepared:
        """Return the columns that `loss` reads, such as advantages within groups, and metrics of the rollout."""
        is_token = rollout.targets != IGNORED_TARGET
        counts = ~rollout.is_truncated if self.settings.overlong_filtering else torch.ones_like(rollout.is_truncated)
        columns = {name: rollout.recorded[name] for name in ("old", _REFERENCE) if name in rollout.recorded}
        rewards, metrics = rollout.rewards, dict[str, float]()
        if self.settings.use_kl_in_reward and self._has_reference:
            kl = kl_estimate(
                rollout.recorded["policy"],
                columns.pop(_REFERENCE),
                kl_type=self.settings.kl_type,
                input_clamp=self.settings.kl_input_clamp,
                output_clamp=self.settings.kl_output_clamp,
            )
            rewards = penalized_rewards(rewards, kl.double(), is_token, self.settings.ref_policy_kl_penalty)
            metrics["rollout_kl"] = float(kl[is_token].double().mean())
        advantages = group_advantages(
            rewards,
            rollout.group,
            use_rloo=self.settings.use_rloo,
            normalize_rewards=self.settings.normalize_rewards,
        )
        mask = is_token & counts[:, None]
        columns |= {
            "sampler": rollout.sampler,
            "advantage": advantages.advantage.float(),
            "is_counted": counts,
            "reward": rollout.rewards,
        }
        if self.settings.positive_example_nll_weight > 0:
            columns["nll_scale"] = self._nll_scale(mask, rollout.rewards)
        return Prepared(columns, metrics | _describe(rewards, rollout))

    def example(self, num_samples: int, seq_len: int) -> Microbatch:
        """Return a microbatch of `num_samples` completions of `seq_len` tokens, for planning."""
        per_token = torch.zeros(num_samples, seq_len)
        per_sample = torch.zeros(num_samples)
        columns = {"sampler": per_token, "advantage": per_sample, "is_counted": torch.ones(num_samples).bool()}
        columns["reward"] = per_sample.double()
        if self.settings.updates_per_rollout > 1:
            columns["old"] = per_token
        if self._has_reference and not self.settings.use_kl_in_reward:
            columns[_REFERENCE] = per_token
        if self.settings.positive_example_nll_weight > 0:
            columns["nll_scale"] = per_sample
        return {**super().example(num_samples, seq_len), **columns}

    def _log_probs(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities after the filters and without them, (completions, seq) float32 each.

        If sampling uses no filters, the result is the log-probabilities and None.
        """
        options = document_keywords(model, microbatch)
        if self._is_filtered:
            options["read"] = self._read
        output = model(microbatch["tokens"], microbatch["targets"], **options)
        log_prob = _by_completion(output.log_prob, microbatch)
        return (
            (_by_completion(output.read["filtered"], microbatch), log_prob) if self._is_filtered else (log_prob, None)
        )

    def _read(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return log-probabilities of the targets among the tokens that pass the filters, (tokens,).

        Ignored targets get 0.
        """
        ignored = targets == IGNORED_TARGET
        filtered_log_probs = filtered(logits, **self._filters).log_softmax(-1)
        target_log_probs = filtered_log_probs.gather(-1, targets.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
        return {"filtered": target_log_probs.masked_fill(ignored, 0.0)}

    def _nll_scale(self, mask: Tensor, rewards: Tensor) -> Tensor:
        """Return the scale of the NLL term for each completion, (completions,).

        The scale of an update is the number of valid items divided by the number of valid tokens in completions with a
        reward above 0.
        """
        scales = list[Tensor]()
        for group_mask, reward in zip(
            mask.chunk(self.settings.updates_per_rollout), rewards.chunk(self.settings.updates_per_rollout), strict=True
        ):
            items = group_mask.sum() if self.settings.token_level_loss else group_mask.any(-1).sum()
            positive = (group_mask & (reward > 0)[:, None]).sum().clamp(min=1)
            scales.append((items / positive).expand(len(group_mask)))
        return torch.cat(scales).float()


def _token_log_probs(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """Return log-probabilities of the targets without filters, (completions, seq) float32."""
    output = model(microbatch["tokens"], microbatch["targets"], **document_keywords(model, microbatch))
    return _by_completion(output.log_prob, microbatch)


def _by_completion(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Unpack per-token values, (rows, seq), to (completions, seq), as wide as the columns of a rollout."""
    return unpack(values, microbatch, width=microbatch.get("sampler", values).shape[1])


def _loss_mask(microbatch: Microbatch) -> Tensor:
    """Return the mask of valid tokens, (completions, seq) bool, on the device of the microbatch."""
    mask = _by_completion(microbatch["targets"] != IGNORED_TARGET, microbatch)
    is_sample = (microbatch["position"] >= 0).to(mask.device, non_blocking=True)
    return mask & (microbatch["is_counted"] & is_sample)[:, None]


def _describe(rewards: Tensor, rollout: Rollout) -> dict[str, float]:
    """Return the mean standard deviation of `rewards` within groups, and the fraction of groups without variance."""
    groups = [rewards[rollout.group == group] for group in sorted(set(rollout.group.tolist()))]
    scored_groups = [group[~group.isnan()] for group in groups]
    deviations = torch.stack(
        [mean_and_std(group[None])[1][0] if len(group) > 1 else group.new_zeros(()) for group in scored_groups]
    )
    is_uniform = [len(group) < 2 or bool((group - group[0]).abs().max() <= 1e-9) for group in scored_groups]
    return {"reward_std": float(deviations.mean()), "groups_without_variance": sum(is_uniform) / len(is_uniform)}
