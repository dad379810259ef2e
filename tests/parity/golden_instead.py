"""Checks of foundry's behavior in cases of a deliberate difference, by name of the difference."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from golden_cases import (
    Case,
    assert_equal,
    batch_words,
    by_hand,
    case_overrides,
    compose,
    fields_of,
    refused,
    resolve,
    resolved_words,
    schedule_of,
)
from golden_checks import (
    assert_lengths,
    assert_then,
    check_schedule,
    own_run,
    resumed,
    saved_state,
    sizes_of,
    upstream_run,
)

from foundry.config.lengths import resolve_batch_sizes, resolve_budget
from foundry.core.batch_sizes import BatchSizes

DOES_NOT_FIT = r"(?m)^scheduler\.warmup: is .* not fit into the .* steps of the schedule"


def refuses_ramp_that_outlasts(case: Case) -> None:
    c, total = case["config"], case["config"]["train_samples"]
    assert refused(*batch_words(c)).startswith("hparams.batch_ramp: reaches its last size")
    hparams = compose(*batch_words(c), f'scheduler.horizon="{10 * c["rampup_batch_size"][2]} samples"').hparams
    budget = resolve_budget(hparams, samples_per_epoch=1, dp_size=c["data_parallel_size"])
    steps, sizes = budget.total_steps, budget.batch_sizes
    assert sizes.samples_after(steps) <= total < sizes.samples_after(steps + 1)
    assert case["train_iters"] - steps in (0, 1)


def refuses_nothing(case: Case) -> None:
    sizes, at = sizes_of(case["config"]), case["consumed_samples"]
    assert_equal(case, [sizes.at(n) for n in at], case["global_batch_size"])
    assert "would be rounded down to 0" in refused(*batch_words(case["config"]))
    with pytest.raises(ValueError, match="batch size of 0"):
        sizes.rounded(case["config"]["micro_batch_size"] * case["config"]["data_parallel_size"])


def accepts_beside_schedule(case: Case) -> None:
    c, f = case["config"], fields_of(case)
    message = batch_words(c) if case["kind"] == "step_batch_error" else case_overrides(f)
    ranks, total = c.get("data_parallel_size", 1), f["global_batch_size"]
    microbatch = ranks * (c["micro_batch_size"] if case["kind"] == "step_batch_error" else 1)
    sizes = BatchSizes.parse(f["step_batch_size_schedule"], tokens_per_sample=c.get("seq_length"))
    if total not in (None, sizes.final) or min(sizes.sizes) < microbatch:
        assert re.match(r"hparams\.(global_batch_size|batch_schedule)", refused(*message))
        return
    own = resolve_batch_sizes(compose(*message).hparams, dp_size=ranks, tokens_per_sample=c.get("seq_length"))
    assert own.sizes == [size // microbatch * microbatch for size in sizes.sizes]


def lets_weight_decay_fall(case: Case) -> None:
    c = case["config"]
    _, schedule = resolve(*resolved_words(c))
    values = [schedule.weight_decay(n, n) for n in range(0, c["wd_incr_steps"] + 2)]
    assert (values[0], *values[-2:]) == (c["start_wd"], c["end_wd"], c["end_wd"])
    assert all(after <= before for before, after in pairwise(values))


def keeps_optimizers_weight_decay(case: Case) -> None:
    _, schedule = resolve(*resolved_words(case["config"]))
    assert schedule.weight_decay_curve is None
    assert schedule.weight_decay(0, 1) is None


def refuses_a_rate_of_0(case: Case) -> None:
    check_schedule(case)
    assert "hparams.lr: is 0 but must be above 0" in refused(*resolved_words(case["config"])).splitlines()


def refuses_overlap(case: Case) -> None:
    check_schedule(case)
    assert re.search(DOES_NOT_FIT, refused(*resolved_words(case["config"])))


def refuses_filled(case: Case) -> None:
    assert re.match(DOES_NOT_FIT, refused(*case_overrides(fields_of(case))))


def counts_by_hand(case: Case) -> None:
    f = fields_of(case)
    expected = by_hand(f)
    if expected["train_iters"] == 0:
        assert "less than one optimizer step" in refused(*case_overrides(f))
    else:
        assert_lengths(case, f, expected)


def refuses_other_styles_decay(case: Case) -> None:
    message = refused(*case_overrides(fields_of(case)))
    assert message.startswith("scheduler.decay: is not a setting of the chosen scheduler; it belongs to scheduler=wsd")


def decays_three_tenths(case: Case) -> None:
    f = fields_of(case)
    assert_lengths(case, f, {**case["computed"], "wsd_decay_steps": 0.3 * case["computed"]["lr_decay_steps"]})
    if case["computed"]["wsd_decay_steps"] and not case["computed"]["lr_warmup_steps"]:
        assert_lengths(case, f, case["computed"], "scheduler.decay=1.0")


def counts_epochs_in_samples(case: Case) -> None:
    c = case["config"]
    budget, schedule = resolve(*case_overrides(c), samples_per_epoch=c["dataset_size"])
    steps = int(c["num_epochs"] * c["dataset_size"]) // c["global_batch_size"]
    assert (budget.total_steps, schedule.horizon) == (steps, steps * c["global_batch_size"])


def resumes_at_once(case: Case) -> None:
    schedule, loaded = resumed(case), case["after_load"]
    assert schedule == schedule_of(saved_state(case))
    now = schedule.weight_decay(loaded["num_steps"], loaded["num_steps"])
    assert now != loaded["wd"]
    assert_then(case, schedule, [{**loaded, "wd": now}, *case["then"]])


def reads_no_old_bounds(case: Case) -> None:
    schedule, theirs = resumed(case), [case["after_load"], *case["then"]]
    assert schedule == schedule_of(case["config"])
    own = [schedule.lr_at(at["num_steps"]) for at in theirs]
    assert own != [at["lr"] for at in theirs]
    bounds = {**case["config"], **case["param_group_from_optimizer_checkpoint"]}
    assert_then(case, schedule_of(bounds), theirs)


def counts_once(case: Case) -> None:
    schedule, saved = resumed(case), saved_state(case)
    assert case["after_load"]["num_steps"] == saved["num_steps"] + case["steps_before_load"]
    assert_then(case, schedule, [case["after_load"], *case["then"]])  # Equal at Megatron's wrong positions.
    assert schedule.lr_at(saved["num_steps"]) > schedule.lr_at(case["after_load"]["num_steps"])


def ends_with_the_run(case: Case) -> None:
    updates, _ = upstream_run(case)
    schedule = own_run(case)
    assert schedule.horizon == case["consumed_samples"]
    assert schedule.lr(*updates[-1]) == schedule.lr_at(schedule.horizon)
    if case["config"]["lr_decay_style"] in ("linear", "cosine", "WSD"):
        assert schedule.lr(*updates[-1]) == case["config"]["min_lr"]


INSTEAD: dict[str, Callable[[Case], None]] = {
    "ramp_outlasts_run": refuses_ramp_that_outlasts,
    "rounds_to_nothing": refuses_nothing,
    "beside_a_batch_schedule": accepts_beside_schedule,
    "weight_decay_falls": lets_weight_decay_fall,
    "optimizers_weight_decay": keeps_optimizers_weight_decay,
    "nothing_learned": refuses_a_rate_of_0,
    "curve_overlaps": refuses_overlap,
    "fills_horizon": refuses_filled,
    "any_unit": counts_by_hand,
    "decay_of_another_style": refuses_other_styles_decay,
    "default_decay": decays_three_tenths,
    "whole_batches": counts_by_hand,
    "ramped_lengths": counts_by_hand,
    "epochs_in_samples": counts_epochs_in_samples,
    "stale_weight_decay": resumes_at_once,
    "old_bounds": reads_no_old_bounds,
    "double_count": counts_once,
    "one_clock": ends_with_the_run,
}
