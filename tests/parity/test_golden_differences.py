"""Each deliberate difference from Megatron covers exactly its cases and is visible in them."""

import copy
from itertools import accumulate

import golden_cases
import pytest
from golden_cases import OWN_FOLDER, assert_equal, read_cases, resolve, resolved_words
from golden_checks import CHECKS
from golden_differences import DIFFERENCES, differences_of
from golden_instead import INSTEAD

from foundry.core.errors import ConfigError

CASES = {case["id"]: case for case in read_cases(OWN_FOLDER)}
SAME_CURVE = {"nothing_learned", "curve_overlaps"}
"""Differences that are only refusals: the curves of foundry and Megatron agree."""


def changed(name, **changes):
    """Return a recorded case with changed values; mappings are merged, and None removes a key."""
    case = copy.deepcopy(CASES[name])

    def merge(old, new):
        for key, value in new.items():
            if isinstance(value, dict) and isinstance(old.get(key), dict):
                merge(old[key], value)
            elif value is None:
                old.pop(key, None)
            else:
                old[key] = value

    merge(case, changes)
    return case


NEARLY = {
    "the run finishes the ramp": changed("train_iters/ramp_longer_than_training", config={"train_samples": 400_000}),
    "no batch is rounded to nothing": changed(
        "rampup/start_below_dp_decrease", running_global_batch_size=[16, 16, 16, 16, 16, 48, 48, 64]
    ),
    "a valid schedule": changed("step_batch_error/no_colon", config={"global_batch_size": 16}),
    "a constant weight decay falls": changed("error/wd_decreasing", config={"wd_incr_style": "constant"}),
    "weight decay falls below 0": changed("error/wd_decreasing", config={"end_wd": -0.01}),
    "weight decay falls and the warm-up is too long": changed("error/wd_decreasing", config={"lr_warmup_steps": 1000}),
    "only one end of the weight decay": changed("error/start_wd_none", config={"end_wd": 0.1}),
    "no weight decay and no floor": changed("error/start_wd_none", config={"min_lr": 1.0}),
    "warm-up and decay just fit": changed("wsd_linear/longer_than_total", config={"wsd_decay_steps": 900}),
    "a rate of nearly 0": changed("cosine/max_zero", config={"max_lr": 1e-300}),
    "a warm-up of all but a sample": changed("derive/iters_fraction_one", warning=""),
    "a run of no samples": changed("derive/samples_with_warmup_iters", config={"train": {"train_samples": 0}}),
    "two warm-ups": changed("derive/samples_with_warmup_iters", config={"scheduler": {"lr_warmup_fraction": 0.1}}),
    "whole batches": changed("derive/samples_partial_last", config={"train": {"train_samples": 992}}),
    "an epoch of whole batches": changed("epochs/exact", train_iters=21),
    "a number of steps by no rule": changed("epochs/whole", train_iters=97),
    "weight decay of neither schedule": changed("ckpt/use_checkpoint", after_load={"wd": 0.03}),
    "weight decay of the checkpoint": changed("ckpt/use_checkpoint", after_load={"wd": 0.046}),
    "bounds as configured": changed(
        "ckpt/override_group_bounds_stay", param_group_from_optimizer_checkpoint={"max_lr": 1e-4, "min_lr": 1e-6}
    ),
    "bounds that are not overridden": changed("ckpt/override_group_bounds_stay", override_opt_param_scheduler=False),
    "a fresh clock": changed("ckpt/double_step", steps_before_load=0),
}


def ramped_run():
    """Return a case of 100 updates with a batch ramp from 8 to 16, which Megatron's horizon of 1600 samples ignores."""
    sizes = [8] * 20 + [16] * 80
    *before, total = accumulate(sizes, initial=0)

    def lr(samples):
        if samples <= 160:
            return 1e-3 * samples / 160
        return 1e-3 * (1 - (samples - 1280) / 320) if samples > 1280 else 1e-3

    return changed(
        "run/bridge_2609_no_ramp",
        rampup_batch_size=[8, 8, 160],
        batch_size=sizes,
        lr_used=[lr(samples) for samples in before],
        final_lr=lr(total),
        final_num_steps=total,
        consumed_samples=total,
    )


def batches(schedule, **changes):
    return changed("step_batch_error/no_colon", config={"step_batch_size_schedule": schedule, **changes})


def ramped(**lengths):
    train = {"train_iters": 20, "global_batch_size": 16, "rampup_batch_size": [8, 8, 64]}
    return changed("derive/iters_wsd", config={"train": train, "scheduler": {"lr_wsd_decay_iters": 5, **lengths}})


# Cases made here, for differences that no recorded case has.
OTHERS = {
    "any_unit": [changed("derive/both_modes", config={"train": {"train_samples": n}}) for n in (16, 160, 319, 640)],
    "beside_a_batch_schedule": [
        batches("0:16 100:32", global_batch_size=32),
        batches("0:16 100:32", global_batch_size=16),
        batches("0:16 100:35", micro_batch_size=4, decrease_batch_size_if_needed=True),
        batches("0:2 100:32", micro_batch_size=4, decrease_batch_size_if_needed=True),
    ],
    "ramped_lengths": [ramped(), ramped(lr_warmup_iters=6), ramped(lr_warmup_iters=10, lr_decay_iters=15)],
    "one_clock": [ramped_run()],
}


@pytest.fixture(autouse=True)
def not_counted(monkeypatch):
    """Keep the comparisons of this file out of the summary, which counts each recorded case once."""
    monkeypatch.setattr(golden_cases, "deviations", {})


def test_differences_apply_to_exactly_the_listed_cases():
    found = {case_id: differences_of(case) for case_id, case in CASES.items()}
    assert {case_id: names for case_id, names in found.items() if names} == {
        case_id: [name] for name, difference in DIFFERENCES.items() for case_id in difference.ids
    }
    assert INSTEAD.keys() == DIFFERENCES.keys()
    assert len(CASES) == 130


@pytest.mark.parametrize("case_id", [i for name, it in DIFFERENCES.items() if name not in SAME_CURVE for i in it.ids])
def test_case_with_a_difference_fails_megatrons_check(case_id):
    with pytest.raises((AssertionError, ConfigError, ValueError)):
        CHECKS[CASES[case_id]["kind"]](CASES[case_id])


@pytest.mark.parametrize("case", NEARLY.values(), ids=NEARLY)
def test_similar_case_without_a_difference_is_not_excused(case):
    assert differences_of(case) == []


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case["id"].startswith("wsd_") and not differences_of(case)]
)
def test_wsd_phases_that_fit_the_horizon_are_accepted(case):
    _, schedule = resolve(*resolved_words(case["config"]))
    assert_equal(case, [schedule.lr_at(step) for step in case["steps"]], case["lr"])


@pytest.mark.parametrize("name", OTHERS)
def test_differences_without_a_recorded_case_hold(name):
    for case in OTHERS[name]:
        assert differences_of(case)[0] == name
        INSTEAD[name](case)
