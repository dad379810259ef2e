"""Checks of the Megatron cases by kind: foundry gives the same numbers and the same refusals."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from golden_cases import (
    CURVES,
    Case,
    assert_equal,
    batch_words,
    case_overrides,
    compose,
    fields_of,
    group_of,
    refused,
    resolve,
    resolved_words,
    schedule_of,
)

from foundry.config.lengths import resolve_batch_sizes, resolve_budget
from foundry.config.schemas.checkpoint import SchedulerOnResume
from foundry.config.schemas.scheduler import EvaluateAt
from foundry.core.batch_sizes import BatchSizes
from foundry.core.errors import ConfigError
from foundry.models.initialisation import output_std, resolve_std
from foundry.optim.schedule_state import reconcile
from foundry.optim.schedules import WSD, Schedule

LENGTHS = ("train_iters", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps")


def check_schedule(case: Case) -> None:
    group, config = group_of(case), {**case["config"], **group_of(case)}
    schedule, steps = schedule_of(config), case["steps"]
    rates = [schedule.lr_at(step) for step in steps]
    if "lr_dtype" in case:  # Megatron stores the rate in a float32 tensor.
        rates = torch.tensor(rates, dtype=torch.float32).tolist()
    assert_equal(case, rates, case["lr"], "learning rate")
    curve = schedule.weight_decay_curve
    assert curve is not None
    expected = list(case["wd"])
    multiplier = group.get("wd_mult", 1.0)
    ours = [curve.at(step) * multiplier for step in steps]
    for place, step in enumerate(steps):
        # Megatron's start + (end - start) may miss the end by a rounding error; foundry's does not.
        if step == curve.horizon and math.isclose(ours[place], expected[place], rel_tol=2**-51):
            assert ours[place] == curve.end * multiplier
            expected[place] = ours[place]
    assert_equal(case, ours, expected, "weight decay")


def check_error(case: Case) -> None:
    c = case["config"]
    message = resolved_words(c)
    if case.get("use_checkpoint_opt_param_scheduler") and case.get("override_opt_param_scheduler"):
        message.append("checkpoint.scheduler_on_resume=both")
    keys = {line.partition(":")[0] for line in refused(*message).splitlines()}
    assert keys <= set(offences(c)) | {line.partition("=")[0] for line in message if line.endswith(("null", "=both"))}


def offences(c: Case) -> list[str]:
    """Return the keys that foundry may reject, by Megatron's own rules for single values and pairs."""

    def number(name: str) -> float:
        return math.nan if c[name] is None else c[name]

    decay, warmup, changes = number("lr_decay_steps"), number("lr_warmup_steps"), c["wd_incr_style"] != "constant"
    rules = {
        "scheduler": c["lr_decay_style"] not in CURVES,
        "hparams.lr": number("max_lr") <= 0,
        "scheduler.min_lr": number("min_lr") < 0 or number("min_lr") > number("max_lr"),
        "scheduler.warmup_init": number("init_lr") > number("max_lr"),
        "hparams.max_steps": decay <= 0,
        "scheduler.warmup": warmup < 0 or warmup >= decay,
        "scheduler.start_weight_decay": number("start_wd") < 0,
        "scheduler.end_weight_decay": number("end_wd") < 0,
        "scheduler.weight_decay_incr_style": c["wd_incr_style"] not in ("constant", "linear", "cosine")
        or (not changes and c["start_wd"] != c["end_wd"]),
        "scheduler.weight_decay_horizon": changes and number("wd_incr_steps") <= 0,
        "scheduler.decay_style": c["lr_decay_style"] == "WSD"
        and c["lr_wsd_decay_style"] not in ("exponential", "linear", "cosine", "minus_sqrt"),
    }
    return [key for key, broken in rules.items() if broken]


def check_derived(case: Case) -> None:
    f = fields_of(case)
    if "exception" in case:
        keys = [line.partition(":")[0] for line in refused(*case_overrides(f)).splitlines()]
        assert all(key.startswith(("hparams.", "scheduler", "checkpoint.")) for key in keys), keys
    else:
        assert_lengths(case, f, case["computed"])


def assert_lengths(case: Case, f: Case, expected: Case, *more: str) -> None:
    budget, schedule = resolve(*case_overrides(f), *more)
    curve = schedule.weight_decay_curve
    assert curve is not None
    ours = {
        "train_iters": budget.total_steps,
        "lr_warmup_steps": schedule.warmup,
        "lr_decay_steps": schedule.horizon,
        "wd_incr_steps": curve.horizon,
        "wsd_decay_steps": schedule.decay if isinstance(schedule, WSD) else None,
    }
    given = [name for name in LENGTHS if expected.get(name) is not None]
    assert_equal(case, [ours[name] for name in given], [expected[name] for name in given], str(given))
    assert expected.get("wsd_decay_steps") is not None or ours["wsd_decay_steps"] is None


def check_epochs(case: Case) -> None:
    budget, schedule = resolve(*case_overrides(case["config"]), samples_per_epoch=case["config"]["dataset_size"])
    expected = [case["train_iters"], case["lr_decay_steps"]]
    assert_equal(case, [budget.total_steps, schedule.horizon], expected)


def check_ramp(case: Case) -> None:
    c, at, errors = case["config"], case["consumed_samples"], case["consistency_error"]
    microbatch = c["micro_batch_size"] * c["data_parallel_size"]
    plain = sizes_of(c)
    assert_equal(case, [plain.at(n) for n in at], case["global_batch_size"])
    running = plain.rounded(microbatch) if c.get("decrease_batch_size_if_needed") else plain
    assert_equal(case, [running.at(n) for n in at], case.get("running_global_batch_size", case["global_batch_size"]))
    assert_equal(case, [running.at(n) // microbatch for n in at], case["num_microbatches"])
    if any(errors):
        assert f" = {microbatch}" in refused(*batch_words(c))
    else:
        composed = compose(*batch_words(c))
        ours = resolve_batch_sizes(
            composed.hparams, dp_size=c["data_parallel_size"], tokens_per_sample=c.get("seq_length")
        )
        assert ours.thresholds == running.thresholds
        check_equal_ramp(case, running)


def check_equal_ramp(case: Case, running: BatchSizes) -> None:
    """Check that a ramp with whole-number stages equals the ramp given by `every_samples`."""
    c = case["config"]
    start, increment, over = c.get("rampup_batch_size") or (None, None, None)
    if start is None or over * increment % (c["global_batch_size"] - start):
        return
    words = [word for word in batch_words(c) if not word.startswith("hparams.batch_ramp.over_samples=")]
    every = over * increment // (c["global_batch_size"] - start)
    hparams = compose(*words, f"hparams.batch_ramp.every_samples={every}").hparams
    assert (
        resolve_batch_sizes(hparams, dp_size=c["data_parallel_size"], tokens_per_sample=None).thresholds
        == running.thresholds
    )


def check_step_batch(case: Case) -> None:
    thresholds = sizes_of(case["config"]).thresholds
    assert [list(pair) for pair in thresholds] == [
        pair for before, pair in pairwise([[None, None], *case["parsed"]]) if before[1] != pair[1]
    ]
    check_ramp(case)


def sizes_of(c: Case) -> BatchSizes:
    if c.get("step_batch_size_schedule"):
        return BatchSizes.parse(c["step_batch_size_schedule"], tokens_per_sample=c["seq_length"])
    if c["rampup_batch_size"] is None:
        return BatchSizes.constant(c["global_batch_size"])
    start, increment, over = c["rampup_batch_size"]
    return BatchSizes.ramp(start=start, increment=increment, over_samples=over, final=c["global_batch_size"])


def check_batch_error(case: Case) -> None:
    assert re.match(
        r"hparams\.(batch_ramp|batch_schedule|global_batch_size|per_gpu)", refused(*batch_words(case["config"]))
    )


def check_train_iters(case: Case) -> None:
    c = case["config"]
    hparams = compose(*batch_words(c)).hparams
    budget = resolve_budget(hparams, samples_per_epoch=1, dp_size=c["data_parallel_size"])
    assert_equal(case, [budget.total_steps], [case["train_iters"]])


def check_trajectory(case: Case) -> None:
    c, iterations = case["config"], case["iterations"]
    sizes, microbatch = sizes_of(c), c["micro_batch_size"] * c["data_parallel_size"]
    ours = {
        "first_iteration_0based": lambda stage: stage.first_step,
        "consumed_samples": lambda stage: stage.first_sample,
        "global_batch_size": lambda stage: stage.global_batch_size,
        "num_microbatches": lambda stage: stage.global_batch_size // microbatch,
    }
    met = [stage for stage in sizes.stages if stage.first_step < iterations]
    assert [[ours[name](stage) for name in case["columns"]] for stage in met] == case["changes"]
    assert_equal(case, [sizes.samples_after(iterations)], [case.get("consumed_after", sizes.samples_after(iterations))])


def check_run(case: Case) -> None:
    updates, own_clock = upstream_run(case)
    schedule = own_run(case)
    assert_equal(
        case, [replace(schedule, evaluate_at=EvaluateAt.start).lr(*update) for update in updates], case["lr_used"]
    )
    assert_equal(case, [schedule.lr(*updates[-1])], [case["final_lr"]], "the last update reads the curve at its end")
    assert own_clock == updates


def upstream_run(case: Case) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return samples before and after each update: all samples, and Megatron's count without failed updates."""
    sizes, failed = case["batch_size"], set(case["failed_iterations_0based"])
    clock = list(pairwise(accumulate(sizes, initial=0)))
    counted = [0 if iteration in failed else size for iteration, size in enumerate(sizes)]
    own = list(pairwise(accumulate(counted, initial=0)))
    curve = schedule_of(case["config"])
    assert_equal(case, [curve.lr(*update) for update in own], case["lr_used"])
    assert_equal(case, [curve.lr_at(case["final_num_steps"])], [case["final_lr"]])
    assert (clock[-1][1], own[-1][1]) == (case["consumed_samples"], case["final_num_steps"])
    return clock, own


def own_run(case: Case) -> Schedule:
    """Return foundry's schedule for the user's settings; assert that batch sizes and run length equal Megatron's."""
    c = case["config"]
    shape = {"lr": c["max_lr"], "min_lr": c["min_lr"], "lr_warmup_init": c["init_lr"]}
    budget, schedule = resolve(*case_overrides({**fields_of(case), **shape}))
    along = [budget.batch_sizes.at(before) for before in accumulate(case["batch_size"][:-1], initial=0)]
    assert along == case["batch_size"]
    assert (budget.total_steps, budget.total_samples) == (len(case["batch_size"]), case["consumed_samples"])
    return schedule


SMALL, WANG = (
    r"small|tears|nguyen|two_fifth|2_?/?\(?5|5_?\*?h|over_5",
    r"wang|530|nlg|turing|third|1_?/?\(?3|3_?\*?h|over_3",
)


def check_std(case: Case) -> None:
    compared = 0
    for row in case["rows"]:
        std, width = row.get("init_method_std", 0.02), row.get("hidden_size", row.get("h", 1))
        texts = " ".join(value for value in row.values() if isinstance(value, str)).lower()
        for name, value in row.items():
            if isinstance(value, str) or name in ("init_method_std", "hidden_size", "h", "num_layers"):
                continue
            if re.search("hybrid|mup", name):  # foundry lacks hybrid models and muP.
                continue
            rules = [rule for rule, message in (("small", SMALL), ("wang", WANG)) if re.search(message, name.lower())]
            rules = rules or [rule for rule, message in (("small", SMALL), ("wang", WANG)) if re.search(message, texts)]
            assert len(rules) == 1 or name in ("hidden_std", "output_layer_std"), f"unknown number {name!r} in {row}"
            ours = resolve_std(rules[0] if rules else std, width)
            # Recorded results of a rule were computed by hand, possibly with operations in another order.
            near = bool(rules) and math.isclose(ours, value, rel_tol=2**-51)
            ours = output_std(ours, row["num_layers"]) if name == "output_layer_std" else ours
            assert_equal(case, [value if near else ours], [value], name)
            compared += 1
    assert compared >= len(case["rows"]), "a row of unknown numbers"


LEGACY = {
    "start_lr": "max_lr",
    "warmup_iter": "lr_warmup_steps",
    "warmup_steps": "lr_warmup_steps",
    "end_iter": "lr_decay_steps",
    "decay_steps": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "num_iters": "num_steps",
}
OURS = {
    "max_lr": "max_lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "warmup",
    "lr_decay_steps": "horizon",
    "lr_decay_style": "style",
    "start_wd": "weight_decay_curve.start",
    "end_wd": "weight_decay_curve.end",
    "wd_incr_steps": "weight_decay_curve.horizon",
    "wd_incr_style": "weight_decay_curve.style",
}


def check_checkpoint(case: Case) -> None:
    if "exception" in case:
        return _check_mismatch(case)
    schedule = resumed(case)
    assert case["after_load"]["num_steps"] == saved_state(case)["num_steps"], "the clock is that of the checkpoint"
    assert_then(case, schedule, [case["after_load"], *case["then"]])
    return None


def saved_state(case: Case) -> Case:
    """Return the checkpoint's state by Megatron's current names, with missing values from the configuration."""
    state = {LEGACY.get(name, name): value for name, value in case["checkpoint_state"].items()}
    return {**{name: value for name, value in case["config"].items() if name not in state}, **state}


def _mode(case: Case) -> SchedulerOnResume:
    if case.get("override_opt_param_scheduler"):
        return SchedulerOnResume.config
    used = case.get("use_checkpoint_opt_param_scheduler")
    return SchedulerOnResume.checkpoint if used else SchedulerOnResume.match


def resumed(case: Case) -> Schedule:
    config = {**case["config"], **(case.get("param_group") or {})}
    schedule = reconcile(schedule_of(config), schedule_of(saved_state(case)).state_dict(), _mode(case))
    state = _flat(schedule)
    for name, value in case.get("effective", {}).items():
        if name in OURS:
            assert state[OURS[name]] == (CURVES[value][0].__name__ if name == "lr_decay_style" else value), name
    return schedule


def assert_then(case: Case, schedule: Schedule, expected: list[Case]) -> None:
    curve = schedule.weight_decay_curve
    assert curve is not None
    for at in expected:
        assert_equal(case, [schedule.lr_at(at["num_steps"])], [at["lr"]], "lr")
        assert_equal(case, [curve.at(at["num_steps"])], [at["wd"]], "wd")


def _flat(schedule: Schedule) -> Case:
    state = schedule.state_dict()
    nested = {f"weight_decay_curve.{name}": value for name, value in (state["weight_decay_curve"] or {}).items()}
    return {**state, **nested}


def _check_mismatch(case: Case) -> None:
    here, there = schedule_of(case["config"]), schedule_of(saved_state(case))
    ours, theirs = _flat(here), _flat(there)
    differing = {n for n in ours | theirs if ours.get(n) != theirs.get(n) and n != "weight_decay_curve"}
    with pytest.raises(ConfigError) as refusal:
        reconcile(here, there.state_dict(), _mode(case))
    for name in differing:
        message = next(str(v) for v in refusal.value.violations if v.key == f"scheduler.{name}")
        for value in (ours.get(name), theirs.get(name)):
            assert ("not set" if value is None else str(value)) in message
    assert len(refusal.value.violations) == len(differing) >= 1


def check_state(case: Case) -> None:
    state = _flat(schedule_of(case["config"]))
    ours = {name: state[own] for name, own in OURS.items()}
    style = CURVES[case["state"]["lr_decay_style"]][0].__name__
    # foundry saves the number of samples with its clock, not with the schedule.
    assert {**ours, "num_steps": 0} == {**case["state"], "lr_decay_style": style}


CHECKS: dict[str, Callable[[Case], None]] = {
    "schedule": check_schedule,
    "error": check_error,
    "derive": check_derived,
    "derive_lm": check_derived,
    "derive_epochs": check_epochs,
    "rampup": check_ramp,
    "step_batch": check_step_batch,
    "rampup_error": check_batch_error,
    "step_batch_error": check_batch_error,
    "train_iters": check_train_iters,
    "rampup_trajectory": check_trajectory,
    "run": check_run,
    "std_init": check_std,
    "checkpoint": check_checkpoint,
    "state_dict": check_state,
}
