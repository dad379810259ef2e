"""Recorded fine-tuning cases: reading them, reasons why foundry does not offer some, and settings of the rest.

A file is `{"inputs": {name: ...}, "cases": [...]}`. The first part of a case's id is its kind; the
configuration of a case determines the system and the variant of the kind.
"""

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from golden_cases import FOLDER, OWN_FOLDER

from foundry.tasks.post_training.schemas.distillation import Divergence, OutsideTopK
from foundry.tasks.post_training.schemas.objective import PreferenceLoss
from foundry.tasks.post_training.schemas.policy import ImportanceWeights, KLGradient, KLType

Case = dict[str, Any]

NEMO_DPO = {
    "reference_policy_kl_penalty",
    "preference_loss_weight",
    "sft_loss_weight",
    "preference_average_log_probs",
    "sft_average_log_probs",
    "pair_mask",
}
TRL_DPO = {"loss_type", "beta", "loss_weights", "label_smoothing"}
PREFERENCE_LOSSES = {
    "sigmoid": PreferenceLoss.sigmoid,
    "sigmoid_norm": PreferenceLoss.sigmoid,
    "hinge": PreferenceLoss.hinge,
    "ipo": PreferenceLoss.ipo,
}
AVERAGED = {"sigmoid_norm", "ipo"}
NEMO_ADVANTAGES = {"normalize_rewards", "use_rloo", "use_leave_one_out_baseline", "eps"}
TRL_ADVANTAGES = {"scale_rewards", "normalize_advantages", "eps"}
NEMO_POLICY = {
    "disable_ppo_ratio",
    "token_level_loss",
    "sequence_level_importance_ratios",
    "ratio_clip_min",
    "ratio_clip_max",
    "ratio_clip_c",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
    "use_kl_in_reward",
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "use_on_policy_kl_approximation",
    "force_on_policy_ratio",
    "use_cispo",
    "positive_example_nll_weight",
    "sample_mask",
    "rewards",
}
TRL_POLICY = {
    "loss_type",
    "delta",
    "beta",
    "epsilon",
    "epsilon_low",
    "epsilon_high",
    "importance_sampling_level",
    "use_bias_correction_kl",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
}
TRL_POLICY_LOSSES = {"grpo", "dapo", "cispo"}
NEMO_DIVERGENCES = {"kl_type", "topk", "zero_outside_topk", "mixed_kl_weight"}
OTHER_DIVERGENCES = {"beta", "temperature", "ratio", "kd_ratio", "ce_ratio"}
COUNTS = {"global_valid_toks", "global_valid_seqs"}
"""Settings that foundry derives from the masks: divisors of the loss."""
KNOWN = {
    "grpo_adv": NEMO_ADVANTAGES | TRL_ADVANTAGES,
    "kl": {"kl_type"},
    "sft": set[str](),
    "kd": NEMO_DIVERGENCES | OTHER_DIVERGENCES,
    "sampling": {"temperature", "top_k", "top_p"},
    "lr": {"learning_rate", "min_learning_rate", "warmup_steps", "total_steps", "lr_scheduler"},
    "lora": {"patterns", "alpha", "lora_alpha", "use_rslora", "rslora", "dim", "r", "rank"},
    "trainer": {"val_check_interval", "patience", "min_delta"},
}
"""Settings that the check of a kind reads, for kinds with one set of settings for all systems."""
TRL_IMPORTANCE_WEIGHTS = {"token_truncate": ImportanceWeights.tis, "token_mask": ImportanceWeights.icepop}
IMPORTANCE_WEIGHTS = {
    None: ImportanceWeights.plain,
    "tis": ImportanceWeights.tis,
    "icepop": ImportanceWeights.icepop,
    "seq-mask-tis": ImportanceWeights.seq_mask,
}


@cache
def finetuning_cases() -> list[Case]:
    """Return all cases of the stored files and of FOUNDRY_GOLDENS, sorted by id, each with its inputs."""
    cases: dict[str, Case] = {}
    for path in sorted({*OWN_FOLDER.glob("*.json"), *FOLDER.glob("*.json")}, key=str):
        cases |= {case["id"]: case for case in read_cases(path)}
    return [cases[name] for name in sorted(cases)]


def read_cases(path: Path) -> Iterator[Case]:
    """Yield the cases of a JSON file; none if its format is another one, which other tests read."""
    recorded = json.loads(path.read_text())
    if not isinstance(recorded, dict) or "cases" not in recorded:
        return
    inputs = recorded.get("inputs", {})
    for case in recorded["cases"]:
        name = case.get("inputs")
        # A remark may follow the name, as in "grpo (curr as logprobs)".
        values = inputs[name.split()[0]] if isinstance(name, str) else name or {}
        yield case | {"inputs": values, "config": case.get("config") or {}}


def not_offered(case: Case) -> str | None:
    """Return the reason why foundry cannot compute a case; None if it can."""
    kind, config = case["id"].split("/")[0], case["config"]
    if unknown := sorted(config.keys() - known_settings(kind, config) - COUNTS):
        return f"settings that are not known here: {', '.join(unknown)}"
    kinds = {"dpo": _dpo, "grpo_adv": _advantages, "grpo_loss": _policy, "kd": _divergence}
    return next(kinds[kind](config), None) if kind in kinds else None


def known_settings(kind: str, config: Case) -> set[str]:
    """Return the settings that the check of a kind reads; any other may change the numbers, even false or null."""
    if kind == "dpo":
        return TRL_DPO if "loss_type" in config else NEMO_DPO
    if kind == "grpo_loss":
        return NEMO_POLICY if is_nemo_policy(config) else TRL_POLICY
    return KNOWN.get(kind, set(config))


def _dpo(config: Case) -> Iterator[str]:
    types = _loss_types(config)
    if "sft" in types:
        yield "its SFT term is a mean over the tokens of a microbatch; foundry's are means over pairs"
    if len(types) > 1:
        yield "several preference losses at once"
    if types and types[0] not in PREFERENCE_LOSSES:
        yield f"the preference loss {types[0]}"


def _advantages(config: Case) -> Iterator[str]:
    if config.get("scale_rewards") == "batch" or config.get("normalize_advantages"):
        yield "a deviation over prompts, which makes an advantage depend on the other prompts of the batch"


def _policy(config: Case) -> Iterator[str]:
    if is_nemo_policy(config):
        return
    loss = config.get("loss_type", "dapo")
    if loss == "dr_grpo":
        yield "a sum divided by the longest possible completion, not by the number of tokens"
    if loss == "bnpo":
        yield "a mean over the tokens of a microbatch, which depends on how the batch is cut"
    if loss not in TRL_POLICY_LOSSES:
        yield f"the policy loss {loss}"
    mode = config.get("vllm_importance_sampling_mode")
    if config.get("vllm_importance_sampling_correction") and mode not in TRL_IMPORTANCE_WEIGHTS:
        yield f"weights of whole sequences ({mode}) beside ratios of tokens"


def _divergence(config: Case) -> Iterator[str]:
    if config.get("kl_type", "forward") not in {kind.value for kind in Divergence}:
        yield f"the divergence {config['kl_type']}"


def is_nemo_policy(config: Case) -> bool:
    """Return True for a policy case of NeMo-RL, whose cases list all settings; cases of TRL omit defaults."""
    return bool(config.keys() & (NEMO_POLICY | COUNTS))


def _loss_types(config: Case) -> list[str]:
    types = config.get("loss_type") or []
    return [types] if isinstance(types, str) else list(types)


def dpo_settings(config: Case) -> dict[str, Any]:
    """Return the keyword arguments of `pair_losses` for the configuration of a DPO case."""
    if "loss_type" not in config:
        return {
            "ref_policy_kl_penalty": config.get("reference_policy_kl_penalty", 0.05),
            **{
                name: config[name] for name in NEMO_DPO - {"reference_policy_kl_penalty", "pair_mask"} if name in config
            },
        }
    (loss_type,) = _loss_types(config)
    return {
        "ref_policy_kl_penalty": config.get("beta", 0.1),
        "loss_type": PREFERENCE_LOSSES[loss_type],
        "preference_average_log_probs": loss_type in AVERAGED,
        "preference_loss_weight": (config.get("loss_weights") or [1.0])[0],
    }


def advantage_settings(config: Case) -> dict[str, Any]:
    """Return the keyword arguments of `group_advantages` for the configuration of a case."""
    if "scale_rewards" in config:
        by_group = config["scale_rewards"] in ("group", True)
        return {"use_rloo": False, "normalize_rewards": by_group, "epsilon": config.get("eps", 1e-4)}
    if "normalize_advantages" in config:
        return {"use_rloo": True, "normalize_rewards": False}
    return {
        "use_rloo": config.get("use_rloo", config.get("use_leave_one_out_baseline", True)),
        "normalize_rewards": config.get("normalize_rewards", True),
        "epsilon": config.get("eps", 1e-6),
    }


def policy_settings(config: Case) -> dict[str, Any]:
    """Return the arguments of `PolicyGradient` for the configuration of a policy case."""
    if not is_nemo_policy(config):
        return _trl_policy_settings(config)
    kept = {
        "disable_ppo_ratio",
        "token_level_loss",
        "sequence_level_importance_ratios",
        "ratio_clip_min",
        "ratio_clip_max",
        "ratio_clip_c",
        "use_kl_in_reward",
        "use_importance_sampling_correction",
        "use_on_policy_kl_approximation",
        "force_on_policy_ratio",
        "use_cispo",
    }
    return {
        **{name: config[name] for name in kept if name in config},
        "ref_policy_kl_penalty": config.get("reference_policy_kl_penalty", 0.01),
        "kl_type": KLType(config.get("reference_policy_kl_type", "k3")),
        "kl_input_clamp": config.get("kl_input_clamp_value", 20.0),
        "kl_output_clamp": config.get("kl_output_clamp_value", 10.0),
        "importance_weights": IMPORTANCE_WEIGHTS[config.get("truncated_importance_sampling_type")],
        "importance_weight_min": config.get("truncated_importance_sampling_ratio_min"),
        "importance_weight_max": config.get("truncated_importance_sampling_ratio"),
    }


def _trl_policy_settings(config: Case) -> dict[str, Any]:
    low = config.get("epsilon_low", config.get("epsilon", 0.2))
    high = config.get("epsilon_high")
    high = low if high is None else high
    loss, delta = config.get("loss_type", "dapo"), config.get("delta")
    is_cispo, cap = loss == "cispo", math.inf if delta is None else delta
    return {
        # For CISPO, TRL caps the ratio at epsilon_high itself and has no lower bound.
        "ratio_clip_min": 1.0 if is_cispo else low,
        "ratio_clip_max": high - 1 if is_cispo else min(high, cap - 1),
        "use_cispo": is_cispo,
        # TRL takes the lesser of two products with the advantage: the ratio cut at delta, and the clipped ratio.
        "ratio_clip_c": None if delta is None else max(delta, 1 + high),
        "token_level_loss": loss != "grpo",
        "sequence_level_importance_ratios": config.get("importance_sampling_level", "token") == "sequence",
        "ref_policy_kl_penalty": config.get("beta", 0.0),
        "kl_gradient": KLGradient.ratio if config.get("use_bias_correction_kl", True) else KLGradient.none,
        "kl_input_clamp": None,
        "kl_output_clamp": None,
        "use_importance_sampling_correction": bool(config.get("vllm_importance_sampling_correction")),
        "importance_weights": TRL_IMPORTANCE_WEIGHTS.get(
            config.get("vllm_importance_sampling_mode"), ImportanceWeights.plain
        ),
        "importance_weight_min": config.get("vllm_importance_sampling_clip_min"),
        "importance_weight_max": config.get("vllm_importance_sampling_clip_max", 3.0),
    }


def divergence_settings(config: Case) -> tuple[dict[str, Any], float]:
    """Return the keyword arguments of `divergence`, and a factor for its result."""
    temperature = config.get("temperature", 1.0)
    if "kl_type" in config:
        is_zero = config.get("zero_outside_topk", False)
        return {
            "divergence": Divergence(config["kl_type"]),
            "mixed_kl_weight": config.get("mixed_kl_weight", 0.5),
            "top_k": config.get("topk"),
            "outside_top_k": OutsideTopK.zero if is_zero else OutsideTopK.renormalize,
        }, 1.0
    if "beta" not in config:
        return {"divergence": Divergence.forward, "temperature": temperature}, temperature**2
    beta = config["beta"]
    kind = {0.0: Divergence.forward, 1.0: Divergence.reverse}.get(beta, Divergence.jsd)
    return {"divergence": kind, "temperature": temperature, "jsd_beta": beta}, 1.0
