"""Deliberate differences from Megatron: reasons, tests for the cases with them, and ids of the recorded cases."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from golden_cases import Case, fields_of, schedule_of
from golden_checks import offences, saved_state

from foundry.core.batch_sizes import BatchSizes


@dataclass(frozen=True)
class Difference:
    """A deliberate difference from Megatron, with the cases that show it.

    Attributes:
        reason: reason of the difference.
        applies: tests if a case is of this kind.
        ids: ids of the recorded cases of this kind.
    """

    reason: str
    applies: Callable[[Case], bool]
    ids: tuple[str, ...]


def differences_of(case: Case) -> list[str]:
    """Return the names of the differences that apply to a case; the first selects the check."""
    return [name for name, difference in DIFFERENCES.items() if difference.applies(case)]


def _outlasts(case: Case) -> bool:
    f = case.get("config") or {}
    if case["kind"] != "train_iters" or not f["rampup_batch_size"]:
        return False
    start, increment, over = f["rampup_batch_size"]
    sizes = BatchSizes.ramp(start=start, increment=increment, over_samples=over, final=f["global_batch_size"])
    return sizes.stages[-1].first_sample >= f["train_samples"]


def _beside(case: Case) -> bool:
    c, f = case.get("config") or {}, fields_of(case)
    if not _is_schedule(f.get("step_batch_size_schedule"), c.get("seq_length")):
        return False
    if case["kind"] == "step_batch_error":
        return bool(c.get("decrease_batch_size_if_needed") or c.get("global_batch_size"))
    both = "global_batch_size" in c or "global_batch_size" in c.get("train", {})
    return case["kind"] in ("derive", "derive_lm") and "exception" in case and both


def _is_schedule(text: str | None, tokens_per_sample: int | None) -> bool:
    """Return True if a batch size schedule is valid by itself."""
    try:
        return text is not None and bool(BatchSizes.parse(text, tokens_per_sample=tokens_per_sample).sizes)
    except ValueError:
        return False


def _falls(case: Case) -> bool:
    c = case.get("config") or {}
    if case["kind"] != "error" or offences(c) or None in (c["start_wd"], c["end_wd"]):
        return False
    return bool(c["end_wd"] < c["start_wd"])


def _unset(case: Case) -> bool:
    c = case.get("config") or {}
    unset = case["kind"] == "error" and c["start_wd"] is None and c["end_wd"] is None
    return unset and c["wd_incr_style"] == "constant" and not offences(c)


def _curve_overlaps(case: Case) -> bool:
    c = case.get("config") or {}
    overlaps = case["kind"] == "schedule" and c["lr_decay_style"] == "WSD"
    return overlaps and c["lr_warmup_steps"] + c["wsd_decay_steps"] > c["lr_decay_steps"]


def _derived(case: Case) -> Case | None:
    """Return the values that Megatron derived from the fields of a `derive` case, or None if it refused them."""
    return case.get("computed") if case["kind"] in ("derive", "derive_lm") else None


def _fills(case: Case) -> bool:
    c, f = _derived(case), fields_of(case)
    if c is None or not c.get("lr_decay_steps"):
        return False
    decay = c["wsd_decay_steps"] if f.get("lr_decay_style") == "WSD" and _decay_length(f) else 0
    return "capping" in case.get("warning", "") or c["lr_warmup_steps"] + (decay or 0) > c["lr_decay_steps"]


def _decay_length(f: Case) -> int | None:
    return f.get("lr_wsd_decay_iters") or f.get("lr_wsd_decay_samples")


def _any_unit(case: Case) -> bool:
    f, given = fields_of(case), ("train_iters", "train_samples", "num_epochs")
    budgets = [f[name] for name in given if f.get(name) is not None]
    iters, samples, steps = f.get("train_iters"), f.get("train_samples"), f.get("max_steps")
    if case["kind"] not in ("derive", "derive_lm") or _contradicts(f):
        return False
    if "exception" not in case:  # Megatron ignores a WSD decay in the unit that the run does not use.
        ignored = (iters and f.get("lr_wsd_decay_samples")) or (samples and f.get("lr_wsd_decay_iters"))
        return bool(ignored) and f.get("lr_decay_style") == "WSD"
    if not budgets or min(budgets) <= 0 or (steps is not None and steps <= 0):
        return False
    lengths = ("lr_decay", "lr_warmup", "lr_wsd_decay")
    in_iters, in_samples = (any(f.get(f"{n}_{unit}") for n in lengths) for unit in ("iters", "samples"))
    mixed = (in_iters and (in_samples or not iters)) or (in_samples and not samples)
    return bool(len(budgets) > 1 or mixed or (steps and (not iters or steps < iters)) or f.get("rampup_batch_size"))


def _contradicts(f: Case) -> bool:
    """Return True if two fields belong to one setting of foundry, or if a value is invalid."""
    warmups = [f.get(n) for n in ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")]
    doubled = sum(bool(w) for w in warmups) > 1 or (f.get("lr_decay_iters") and f.get("lr_decay_samples"))
    doubled = doubled or (f.get("lr_wsd_decay_iters") and f.get("lr_wsd_decay_samples"))
    flags = f.get("override_opt_param_scheduler") and f.get("use_checkpoint_opt_param_scheduler")
    numbers = [f.get(n) or 0 for n in ("start_weight_decay", "end_weight_decay", "min_lr")]
    horizons = [n for n in (f.get("lr_decay_iters"), f.get("lr_decay_samples")) if n is not None]
    return bool(doubled or flags or f["global_batch_size"] is None or min(numbers) < 0 or min(horizons, default=1) <= 0)


def _partial(case: Case) -> bool:
    f = fields_of(case)
    return (
        _derived(case) is not None and bool(f.get("train_samples")) and f["train_samples"] % f["global_batch_size"] > 0
    )


def _epochs_rounded(case: Case) -> bool:
    if case["kind"] != "derive_epochs":
        return False
    f = case["config"]
    in_batches = math.ceil(f["num_epochs"] * math.ceil(f["dataset_size"] / f["global_batch_size"]))
    in_samples = int(f["num_epochs"] * f["dataset_size"]) // f["global_batch_size"]
    return bool(in_samples != in_batches == case.get("train_iters"))


def _other_style(case: Case) -> bool:
    f = fields_of(case)
    return _derived(case) is not None and bool(_decay_length(f)) and f.get("lr_decay_style") != "WSD"


def _default_decay(case: Case) -> bool:
    f = fields_of(case)
    return _derived(case) is not None and f.get("lr_decay_style") == "WSD" and not _decay_length(f)


def _stale(case: Case) -> bool:
    """Return True if Megatron's weight decay right after loading is the configuration's instead of the checkpoint's."""
    after = case.get("after_load")
    if case["kind"] != "checkpoint" or not after or not case.get("use_checkpoint_opt_param_scheduler"):
        return False
    here, there = (schedule_of(c).weight_decay_curve for c in (case["config"], saved_state(case)))
    if here is None or there is None:
        return False
    at_loading, then = here.at(after["num_steps"]), there.at(after["num_steps"])
    return not math.isclose(at_loading, then) and math.isclose(after["wd"], at_loading)


def _old_bounds(case: Case) -> bool:
    held = case["kind"] == "checkpoint" and case.get("param_group_from_optimizer_checkpoint")
    if not held or not case.get("override_opt_param_scheduler") or case.get("param_group"):
        return False
    return any(case["config"][name] != value for name, value in held.items())


DIFFERENCES = {
    "ramp_outlasts_run": Difference(
        "foundry never runs past train_samples, and refuses a ramp that the run does not finish, unless the horizon of "
        "the schedule is longer than the run",
        _outlasts,
        ("train_iters/ramp_longer_than_training",),
    ),
    "rounds_to_nothing": Difference(
        "a batch of no microbatches is refused",
        lambda case: (
            case["kind"] == "rampup" and 0 in case.get("running_global_batch_size", ()) and not _inconsistent(case)
        ),
        ("rampup/start_below_dp_decrease",),
    ),
    "beside_a_batch_schedule": Difference(
        "a schedule of batch sizes may stand beside global_batch_size, which then is its last size, and be rounded",
        _beside,
        (),
    ),
    "weight_decay_falls": Difference("weight decay may fall", _falls, ("error/wd_decreasing",)),
    "optimizers_weight_decay": Difference(
        "without start and end the optimizer's own weight decay applies", _unset, ("error/start_wd_none",)
    ),
    "nothing_learned": Difference(
        "a learning rate of 0 is refused, though the curve is the same",
        lambda case: case["kind"] == "schedule" and case["config"]["max_lr"] == 0,
        ("cosine/max_zero",),
    ),
    "curve_overlaps": Difference(
        "phases that do not fit into the horizon are refused, though the curve is the same",
        _curve_overlaps,
        (
            "wsd_exponential/longer_than_total",
            "wsd_exponential/longer_than_total_warmup0",
            "wsd_linear/full_length",
            "wsd_linear/longer_than_total",
            "wsd_linear/longer_than_total_warmup0",
            "wsd_cosine/full_length",
            "wsd_minus_sqrt/full_length",
            "wsd_minus_sqrt/overlaps_warmup",
        ),
    ),
    "fills_horizon": Difference(
        "a warm-up that fills the horizon is refused instead of shortened by a sample",
        _fills,
        ("derive/iters_fraction_one",),
    ),
    "any_unit": Difference(
        "lengths may be in any unit, and of several budgets the shortest wins",
        _any_unit,
        (
            "derive/max_steps_short",
            "derive/max_steps_samples",
            "derive/samples_with_warmup_iters",
            "derive/iters_with_decay_samples",
            "derive/iters_with_warmup_samples",
            "derive/both_modes",
            "derive/samples_rampup",
        ),
    ),
    "decay_of_another_style": Difference(
        "WSD's decay is refused beside another style instead of ignored",
        _other_style,
        ("derive/iters_wsd_not_wsd_style",),
    ),
    "default_decay": Difference(
        "WSD's decay is 0.3 of the horizon unless it is given, not all of it",
        _default_decay,
        ("derive/iters_wsd_default",),
    ),
    "whole_batches": Difference(
        "the run ends with its last whole batch, and the schedule with it", _partial, ("derive/samples_partial_last",)
    ),
    "ramped_lengths": Difference(
        "under a ramp, lengths in steps count the samples of these steps",
        lambda case: _derived(case) is not None and bool(fields_of(case).get("rampup_batch_size")),
        (),
    ),
    "epochs_in_samples": Difference(
        "epochs are counted in samples; an epoch need not be whole batches",
        _epochs_rounded,
        ("epochs/whole", "epochs/fractional"),
    ),
    "stale_weight_decay": Difference(
        "the schedule that is resumed holds from the first update on", _stale, ("ckpt/use_checkpoint",)
    ),
    "old_bounds": Difference(
        "parameter groups of a checkpoint are never read", _old_bounds, ("ckpt/override_group_bounds_stay",)
    ),
    "double_count": Difference(
        "the clock is restored, not added to",
        lambda case: case["kind"] == "checkpoint" and bool(case.get("steps_before_load")),
        ("ckpt/double_step",),
    ),
    "one_clock": Difference(
        "ramped and failed steps consume their samples on the schedule's own clock, so that it ends where the run ends",
        lambda case: case["kind"] == "run" and bool(case["rampup_batch_size"] or case["failed_iterations_0based"]),
        (),
    ),
}


def _inconsistent(case: Case) -> bool:
    return any(case["consistency_error"])
