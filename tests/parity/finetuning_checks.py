"""Checks of the fine-tuning cases by kind: numbers and gradients of foundry equal the recorded ones."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from finetuning_cases import (
    Case,
    advantage_settings,
    divergence_settings,
    dpo_settings,
    policy_settings,
)
from support.divergences import divergence
from torch import Tensor, nn

from foundry.config.schemas.evaluation import EarlyStopping as EarlyStoppingSettings
from foundry.config.schemas.evaluation import Evaluation, PatienceUnit
from foundry.config.schemas.scheduler import EvaluateAt
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.generation.sampling import filtered
from foundry.models.lora import match_targets, merged, scaling
from foundry.models.token_log_probs import TokenLogProbs
from foundry.objectives.next_token import NextToken
from foundry.optim.schedules import Constant, Cosine
from foundry.tasks.post_training.objectives.advantages import group_advantages
from foundry.tasks.post_training.objectives.dpo import PairLosses, pair_losses
from foundry.tasks.post_training.objectives.kl import kl_estimate
from foundry.tasks.post_training.objectives.policy_gradient import (
    Completions,
    policy_loss,
    positive_example_nll,
    sampling_mismatch,
)
from foundry.tasks.post_training.schemas.policy import KLType, PolicyGradient
from foundry.training.early_stopping import EarlyStopping

TOLERANCE = 2e-6
deviations: dict[str, tuple[int, float]] = {}
"""By kind: how many numbers were compared, and the largest deviation relative to max(1, |number|)."""


def assert_close(case: Case, ours: object, theirs: object, what: str) -> None:
    """Compare within 2e-6, absolute or relative, after recording the deviation."""
    a = torch.as_tensor(ours).detach().double().flatten()
    b = torch.as_tensor([_number(value) for value in _flat(theirs)], dtype=torch.float64)
    assert a.shape == b.shape, what
    finite = b.isfinite()
    assert torch.equal(a[~finite], b[~finite]), what
    off = ((a - b).abs() / b.abs().clamp(min=1))[finite]
    kind = "/".join(case["id"].split("/")[:2])
    number, largest = deviations.get(kind, (0, 0.0))
    deviations[kind] = number + len(off), max(largest, off.max().item() if len(off) else 0.0)
    assert bool((off <= TOLERANCE).all()), f"{what}: {a.tolist()} instead of {b.tolist()}"


def check_dpo(case: Case) -> None:
    out, config = case["outputs"], case["config"]
    sides = ("chosen", "rejected")
    policy = {side: _leaf(case["inputs"][f"policy_{side}"]) for side in sides}
    mask = {side: torch.tensor(case["inputs"][f"mask_{side}"]) for side in sides}
    reference = {side: torch.tensor(case["inputs"][f"ref_{side}"], dtype=torch.float64) for side in sides}
    valid = torch.tensor(config.get("pair_mask") or [1] * len(mask["chosen"])).bool()

    def of(rows: Tensor) -> PairLosses:
        return pair_losses(
            torch.stack([(policy[side] * mask[side])[rows].sum(-1) for side in sides], -1),
            torch.stack([(reference[side] * mask[side])[rows].sum(-1) for side in sides], -1),
            torch.stack([mask[side][rows].sum(-1) for side in sides], -1),
            valid[rows],
            **dpo_settings(config),
        )

    everything, count = of(torch.arange(len(valid))), valid.sum()
    loss = everything.loss.sum() / count
    compare_cuts(case, loss, lambda rows: of(rows).loss.sum() / count)
    loss.backward()
    for side in sides:
        compare_gradient(case, policy[side], f"grad_policy_{side}")
    rewards = everything.rewards
    means = {"sft_loss": everything.sft, "preference_loss": everything.preference}
    if "loss_type" in config:  # TRL logs rewards as sums times beta.
        rewards = torch.stack([((policy[s] - reference[s]) * mask[s]).sum(-1) for s in sides], -1) * config["beta"]
        margins = rewards[:, 0] - rewards[:, 1]
        means = {"rewards/margins": margins}
    accurate = (rewards[:, 0] > rewards[:, 1]) & valid
    means |= {"accuracy": accurate.double(), "rewards/accuracies": accurate.double()}
    for index, side in enumerate(sides):
        means |= {f"rewards_{side}_mean": rewards[:, index], f"rewards/{side}": rewards[:, index]}
    for name in means.keys() & out.keys():
        if name == "sft_loss" and not config.get("sft_loss_weight"):
            continue  # NeMo-RL does not compute this loss if its weight is 0.
        assert_close(case, means[name].sum() / count, out[name], name)


def check_advantages(case: Case) -> None:
    rewards, groups = case["inputs"]["rewards"], torch.tensor(case["inputs"]["group"])
    out = case["outputs"]
    wanted = {"advantage": out["exact"]} if "exact" in out else out
    for dtype in (torch.float64, torch.float32) if "exact" in out else (torch.float64,):
        ours = group_advantages(torch.tensor(rewards, dtype=dtype), groups, **advantage_settings(case["config"]))
        assert ours.advantage.dtype == dtype
        for name in {"baseline", "std", "advantage"} & wanted.keys():
            if name == "std" and "normalize_advantages" in case["config"]:
                continue  # This `std` is for TRL's log only: over all completions of a prompt.
            assert_close(case, getattr(ours, name), wanted[name], name)


def check_kl(case: Case) -> None:
    kind, out = KLType(case["config"]["kl_type"]), case["outputs"]
    for suffix, clamps, name in (
        ("unclamped", {"input_clamp": None, "output_clamp": None}, "per_token_unclamped"),
        ("clamped", {}, "per_token_clamped_in20_out10"),
    ):
        log_prob = _leaf(case["inputs"]["logp"])
        kl = kl_estimate(log_prob, torch.tensor(case["inputs"]["ref"], dtype=torch.float64), kl_type=kind, **clamps)
        assert_close(case, kl, out[name], name)
        kl.sum().backward()
        assert_close(case, log_prob.grad, out[f"grad_{suffix}"], f"gradient, {suffix}")


def check_policy(case: Case) -> None:
    config = case["config"]
    settings = PolicyGradient(**policy_settings(config))
    names = ("curr", "prev", "gen", "ref", "advantage")
    log_prob, old, sampler, reference, advantage = (_leaf(case["inputs"][name]) for name in names)
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    if "sample_mask" in config:
        mask &= torch.tensor(config["sample_mask"]).bool()[:, None]
    count = mask.sum() if settings.token_level_loss else mask.any(-1).sum()

    def of(rows: Tensor) -> Tensor:
        part = Completions(
            log_prob=log_prob[rows],
            old=old[rows].detach(),
            sampler=sampler[rows].detach(),
            reference=reference[rows].detach(),
            mask=mask[rows],
            advantage=advantage[rows].detach(),
        )
        loss = policy_loss(part, settings).loss / count
        if weight := config.get("positive_example_nll_weight"):
            rewards = torch.tensor(config["rewards"])
            _, number = positive_example_nll(log_prob, mask, rewards)
            loss = loss + weight * positive_example_nll(part.log_prob, part.mask, rewards[rows])[0] / number
        return loss

    everything = torch.arange(len(mask))
    loss = of(everything)
    compare_cuts(case, loss, of)
    loss.backward()
    compare_gradient(case, log_prob, "grad_curr")
    check_monitors(case, log_prob.detach(), old.detach(), sampler.detach(), mask, settings)


def check_monitors(
    case: Case, log_prob: Tensor, old: Tensor, sampler: Tensor, mask: Tensor, settings: PolicyGradient
) -> None:
    """Compare foundry's metrics of sampling mismatch with the logged metrics that the case has."""
    recorded = case["outputs"].get("metrics", {})
    if settings.force_on_policy_ratio:
        old = log_prob
    ours = {name: value / mask.sum() for name, value in sampling_mismatch(log_prob, old, sampler, mask).items()}
    names = {
        "token_mult_prob_error": "mult_prob_error",
        "js_divergence_error": "js_divergence",
        "approx_entropy": "entropy",
    }
    if settings.kl_type is KLType.k3:
        names |= {"gen_kl_error": "sampler_kl", "policy_kl_error": "trainer_kl"}
    for theirs, own in names.items():
        if theirs in recorded:
            assert_close(case, ours[own], recorded[theirs], theirs)


def check_sft(case: Case) -> None:
    """Use the pre-training objective, which has the same loss, with a model that returns the recorded values."""
    x = _leaf(case["inputs"]["curr"])
    mask = torch.tensor(case["inputs"]["mask"]).bool()

    class Recorded(nn.Module):
        def forward(self, tokens: Tensor, targets: Tensor) -> TokenLogProbs:
            return TokenLogProbs(x[tokens[:, 0]].masked_fill(targets < 0, 0.0), torch.empty(0))

    def of(rows: Tensor) -> Tensor:
        part = {
            "tokens": rows[:, None].expand(-1, mask.shape[1]),
            "targets": torch.where(mask[rows], 1, -100),
            "position": rows,
        }
        return NextToken().loss(Recorded(), part).loss / count

    rows = torch.arange(len(mask))
    count = NextToken().num_valid({"targets": torch.where(mask, 1, -100), "position": rows})
    assert count == case["config"].get("global_valid_toks", count)
    loss = of(rows)
    compare_cuts(case, loss, of)
    loss.backward()
    compare_gradient(case, x, "grad")


def check_divergence(case: Case) -> None:
    config = case["config"]
    student = _leaf(case["inputs"]["student_logits"])
    teacher = torch.tensor(case["inputs"]["teacher_logits"], dtype=torch.float64)
    # Logits at a position predict the next token.
    mask = torch.tensor(case["inputs"]["mask"]).bool()[:, 1:]
    labels = torch.tensor(case["inputs"]["labels"])[:, 1:].clamp(min=0)
    settings, factor = divergence_settings(config)

    def of(rows: Tensor) -> Tensor:
        values = factor * divergence(student[rows, :-1], teacher[rows, :-1], **settings)
        ratio = next((config[name] for name in ("ratio", "kd_ratio", "ce_ratio") if name in config), None)
        if ratio is not None:
            cross_entropy = -student[rows, :-1].log_softmax(-1).gather(-1, labels[rows, :, None]).squeeze(-1)
            share = 1 - ratio if "ce_ratio" in config else ratio
            values = share * values + (1 - share) * cross_entropy
        return values.masked_fill(~mask[rows], 0.0).sum() / mask.sum()

    loss = of(torch.arange(len(mask)))
    compare_cuts(case, loss, of)
    loss.backward()
    compare_gradient(case, student, "grad_student_logits")


def compare_cuts(case: Case, loss: Tensor, of: Callable[[Tensor], Tensor]) -> None:
    """Compare the loss of all rows and of recorded subsets, divided by the total count; `mb01_global` is rows 0, 1."""
    for name, value in case["outputs"].items():
        if name in ("loss", "full") or name.startswith("sum"):
            assert_close(case, loss, value, name)
        elif found := re.fullmatch(r"mb(\d\d+)_global", name):
            assert_close(case, of(torch.tensor([int(row) for row in found[1]])), value, name)
    halves = [of(rows) for rows in torch.arange(case_rows(case)).split(1)]
    torch.testing.assert_close(torch.stack(halves).sum(), loss, rtol=1e-12, atol=1e-12)


def compare_gradient(case: Case, leaf: Tensor, name: str) -> None:
    """Compare the gradient of `leaf` with output `name` of the case, if the case has it."""
    if name in case["outputs"]:
        assert_close(case, leaf.grad, case["outputs"][name], name)


def case_rows(case: Case) -> int:
    """Return the number of rows of a case's inputs."""
    return len(next(value for name, value in case["inputs"].items() if isinstance(value, list)))


def check_sampling(case: Case) -> None:
    config, out = case["config"], case["outputs"]
    temperature, top_k = config.get("temperature", 1.0), config.get("top_k")
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64)
    top_p = config.get("top_p")
    kept = filtered(logits, temperature=temperature, top_k=top_k, top_p=1.0 if top_p is None else top_p)
    assert (kept > -torch.inf).tolist() == out["keep"]
    assert_close(case, kept.log_softmax(-1), out["logprob_after_filter"], "log-probabilities")


def check_lr(case: Case) -> None:
    config, rates = case["config"], case["outputs"]["lr_after_n_steps"]
    peak, warmup = config["learning_rate"], config.get("warmup_steps", 0)
    total = config.get("total_steps", len(rates) - 1)
    minimum = config.get("min_learning_rate") or 0.1 * peak
    is_flat = "flat" in case["id"] or config.get("lr_scheduler") == "constant"
    schedule = (Constant if is_flat else Cosine)(
        max_lr=peak,
        min_lr=0.0 if is_flat else minimum,
        warmup=min(warmup, total - 1),
        warmup_init=minimum,
        horizon=total,
        evaluate_at=EvaluateAt.start,
    )
    assert_close(case, [schedule.lr(n, n + 1) for n in range(len(rates))], rates, "learning rates")
    assert max(abs(schedule.lr(n, n + 1) - rate) for n, rate in enumerate(rates)) < 1e-6 * peak


def check_trainer(case: Case) -> None:
    (check_early_stop if "val_losses" in case["inputs"] else check_validation)(case)


def check_validation(case: Case) -> None:
    per_epoch, epochs = case["inputs"]["batches_per_epoch"], case["inputs"]["epochs"]
    every = case["config"]["val_check_interval"]
    sizes = BatchSizes([(0, 1)])
    budget = Budget(total_samples=per_epoch * epochs, batch_sizes=sizes, samples_per_epoch=per_epoch)
    if isinstance(every, int) and every > per_epoch * epochs:
        with pytest.raises(ValueError, match="but the run has only"):
            Evaluation(interval=every).interval_in(budget)
        return
    interval = Evaluation(interval=every).interval_in(budget)
    assert interval is not None
    ours = [step for step in range(1, per_epoch * epochs + 1) if interval.due(step, step - 1, step)]
    is_longer = isinstance(every, int) and every > per_epoch  # Lightning refuses this; foundry evaluates each epoch
    assert ours == (
        [per_epoch * (n + 1) for n in range(epochs)] if is_longer else case["outputs"]["validated_after_batch"]
    )


def check_early_stop(case: Case) -> None:
    config = case["config"]
    settings = EarlyStoppingSettings(
        patience=config.get("patience", 10),
        min_delta=config.get("min_delta", 0.001),
        unit=PatienceUnit.evaluations,
        metric="val_loss",
    )
    stopping = EarlyStopping(settings)
    for check, (value, theirs) in enumerate(
        zip(case["inputs"]["val_losses"], case["outputs"]["stop_wait_best_per_check"], strict=False)
    ):
        stop = stopping.update({"val_loss": _number(value)}, epoch=check)
        wanted = [theirs[0], theirs[1], _number(theirs[2])]
        assert [stop is not None, stopping.wait] == wanted[:2], check
        assert_close(case, stopping.best, wanted[2], "best")
        if stop is not None:
            return


def check_lora(case: Case) -> None:
    if "patterns" in case["config"]:
        names = case["inputs"]["module_names"]
        for pattern, theirs in case["outputs"].items():
            wanted = theirs["fnmatch_or_leaf"] if isinstance(theirs, dict) else theirs
            assert match_targets(names, [pattern]) == wanted, pattern
        return
    if not case["inputs"].keys() >= set("WABx"):
        pytest.skip(f"a case of {', '.join(case['config'])} is not known here")
    weight, a, b, x = (torch.tensor(case["inputs"][name], dtype=torch.float64) for name in "WABx")
    config = case["config"]
    alpha = float(config.get("alpha", config.get("lora_alpha", 2 * len(a))))
    rslora = bool(config.get("use_rslora", config.get("rslora", False)))
    scale = scaling(alpha, len(a), rslora=rslora)
    ours = {
        (): torch.tensor(scale, dtype=torch.float64),
        (len(x), len(weight)): x @ weight.T + scale * (x @ a.T @ b.T),
        tuple(weight.shape): merged(weight, a, b, alpha=alpha, rslora=rslora),
    }
    torch.testing.assert_close(x @ ours[tuple(weight.shape)].T, ours[len(x), len(weight)])
    for name, value in case["outputs"].items():
        shape = tuple(torch.tensor(value).shape)
        own = ours[shape] - weight if "delta" in name and shape == tuple(weight.shape) else ours[shape]
        assert_close(case, own, value, name)


def _leaf(values: list[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float, str)) else math.nan  # "-inf" and "nan" are strings.


def _flat(values: object) -> list[object]:
    return [item for value in values for item in _flat(value)] if isinstance(values, list) else [values]


CHECKS: dict[str, Callable[[Case], None]] = {
    "dpo": check_dpo,
    "grpo_adv": check_advantages,
    "grpo_loss": check_policy,
    "kl": check_kl,
    "sft": check_sft,
    "kd": check_divergence,
    "sampling": check_sampling,
    "lr": check_lr,
    "lora": check_lora,
    "trainer": check_trainer,
}
