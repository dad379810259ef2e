"""Recorded Megatron cases: reading them and translating them into foundry's settings.

`case_overrides` and `batch_words` turn a case into overrides of foundry's command line; `by_hand` computes the
expected result without using foundry.
"""

import json
import os
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from support.composition import configure

from foundry.config.build import build
from foundry.config.lengths import resolve_budget
from foundry.config.schemas.scheduler import DecayStyle, EvaluateAt, IncrementStyle
from foundry.core.batch_sizes import BatchSizes
from foundry.core.errors import ConfigError
from foundry.optim import schedules

Case = dict[str, Any]

OWN_FOLDER = Path(__file__).parent / "goldens"
FOLDER = Path(os.environ.get("FOUNDRY_GOLDENS", OWN_FOLDER))
CURVES = {
    "constant": (schedules.Constant, "constant"),
    "linear": (schedules.Linear, "linear"),
    "cosine": (schedules.Cosine, "cosine"),
    "inverse-square-root": (schedules.InverseSquareRoot, "inverse_square_root"),
    "WSD": (schedules.WSD, "wsd"),
}
EPOCH = 10_000
"""Default samples per epoch of a case."""
deviations: dict[str, tuple[int, float]] = {}
"""By kind: how many numbers were compared, and the largest relative deviation."""


def read_cases(folder: Path) -> list[Case]:
    """Return the cases of every file in the folder that is a list of cases; other formats belong to other tests."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    listed = [case for cases in found if isinstance(cases, list) for case in cases if isinstance(case, dict)]
    return [case for case in listed if {"id", "kind"} <= case.keys()]


def assert_equal(case: Case, ours: Iterator[float] | list[float], theirs: list[float], what: str = "") -> None:
    """Assert that two lists of numbers are equal bit for bit, after recording the largest deviation."""
    ours = list(ours)
    assert len(ours) == len(theirs), what
    number, largest = deviations.get(case["kind"], (0, 0.0))
    off = [abs(a - b) / max(abs(a), abs(b)) for a, b in zip(ours, theirs, strict=True) if a != b]
    deviations[case["kind"]] = number + len(ours), max([largest, *off])
    assert ours == theirs, what


def compose(*overrides: str) -> Any:
    """Compose a configuration with these overrides that evaluates at the end only."""
    return configure("evaluation.interval=null", *overrides)


def refused(*overrides: str) -> str:
    """Return the error messages of invalid overrides, one line per mistake."""
    try:
        compose(*overrides)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"accepted: {' '.join(overrides)}")


def resolve(*overrides: str, samples_per_epoch: int = EPOCH) -> tuple[Any, schedules.Schedule]:
    """Return budget and schedule of a composed configuration."""
    config = compose(*overrides)
    budget = resolve_budget(config.hparams, samples_per_epoch=samples_per_epoch, dp_size=1)
    return budget, build(config.scheduler, max_lr=config.hparams.lr, budget=budget)


def schedule_of(config: Case, evaluate_at: EvaluateAt = EvaluateAt.start) -> schedules.Schedule:
    """Return foundry's schedule for Megatron's resolved numbers, possibly merged with a parameter group's."""
    style, curve = CURVES[config["lr_decay_style"]][0], None
    if config["start_wd"] is not None:
        curve = schedules.WeightDecay(
            start=config["start_wd"],
            end=config["end_wd"],
            horizon=config["wd_incr_steps"],
            style=IncrementStyle(config["wd_incr_style"]),
        )
    shape: dict[str, Any] = {}
    if style is schedules.WSD:
        shape = {
            "decay": config["wsd_decay_steps"],
            "decay_style": DecayStyle(config["lr_wsd_decay_style"] or "exponential"),
        }
    return style(
        max_lr=config["max_lr"],
        min_lr=config["min_lr"],
        warmup=config["lr_warmup_steps"],
        warmup_init=config["init_lr"],
        horizon=config["lr_decay_steps"],
        evaluate_at=evaluate_at,
        weight_decay_curve=curve,
        **shape,
    )


def group_of(case: Case) -> Case:
    """Return the values of a parameter group, stored beside the configuration or inside it."""
    return {**(case["config"].get("param_group") or {}), **(case.get("param_group") or {})}


def resolved_words(config: Case) -> list[str]:
    """Return overrides for Megatron's resolved numbers, with a batch of one sample, so that a step is a sample."""
    style = config["lr_decay_style"]
    settings = {
        "scheduler": CURVES.get(style, (None, style))[1],
        "hparams.global_batch_size": 1,
        "hparams.per_gpu_batch_size": 1,
        "hparams.max_steps": config["lr_decay_steps"],
        "hparams.lr": config["max_lr"],
        "scheduler.warmup": f'"{config["lr_warmup_steps"]} samples"',
        "scheduler.warmup_init": config["init_lr"],
        "scheduler.start_weight_decay": config["start_wd"],
        "scheduler.end_weight_decay": config["end_wd"],
        "scheduler.weight_decay_incr_style": config["wd_incr_style"],
    }
    if style != "constant":  # foundry refuses a floor that has no effect.
        settings["scheduler.min_lr"] = config["min_lr"]
    if style == "WSD":
        decay = config["wsd_decay_steps"]
        settings["scheduler.decay"] = None if decay is None else f'"{decay} samples"'
        settings["scheduler.decay_style"] = config["lr_wsd_decay_style"]
    if config["wd_incr_style"] in ("linear", "cosine"):
        settings["scheduler.weight_decay_horizon"] = f'"{config["wd_incr_steps"]} samples"'
    return _lines(settings)


def batch_words(config: Case) -> list[str]:
    """Return overrides for a case about batch sizes, in a run long enough to reach every batch size."""
    ramp, text, ranks = (config.get(n) for n in ("rampup_batch_size", "step_batch_size_schedule", "data_parallel_size"))
    total, tokens = config.get("global_batch_size"), config.get("seq_length")
    settings: dict[str, Any] = {
        "distributed": "none" if ranks == 1 else "ddp",
        "distributed.nproc_per_node": ranks,
        "hparams.per_gpu_batch_size": config["micro_batch_size"],
        "hparams.allow_rounding": bool(config.get("decrease_batch_size_if_needed")),
        "hparams.max_steps": None,
        "hparams.train_samples": config.get("train_samples", 10**15),
    }
    if text is not None:
        total = total or _final(text)
        settings["hparams.batch_schedule"] = f'"{text}"'
        settings["hparams.batch_schedule_unit"] = "tokens" if tokens else "samples"
        if tokens:
            settings["data.seq_len"] = tokens
    return _lines({**settings, "hparams.global_batch_size": total, **_ramp(ramp)})


def fields_of(case: Case) -> Case:
    """Return the user-set fields of a case and of its configuration, including the `train` and `scheduler` sections."""
    config = case.get("config") or {}
    parts = [
        {"global_batch_size": None if case["kind"] == "derive" else 1},
        case,
        config,
        *((holder.get(n) or {}) for holder in (config, case) for n in ("train", "scheduler")),
    ]
    return {name: value for part in parts for name, value in part.items() if not isinstance(value, dict)}


def case_overrides(f: Case) -> list[str]:
    """Translate the fields that a user set in Megatron-Bridge or Megatron-LM into overrides.

    foundry has one field per purpose, so two of Megatron's fields for one purpose give an invalid length.
    """
    style = f.get("lr_decay_style") or "linear"
    horizon = _length(f, "max_steps") or _length(f, "lr_decay_iters", "lr_decay_samples")
    decays = [f.get(name) for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style")]
    start, end, way = (0.01, 0.1, "linear") if decays == [None] * 3 else (*decays[:2], decays[2] or "linear")
    settings: dict[str, Any] = {
        "scheduler": CURVES.get(style, (None, style))[1],
        "hparams.global_batch_size": f["global_batch_size"],
        "hparams.per_gpu_batch_size": 1,
        "hparams.max_steps": f.get("train_iters"),
        "hparams.train_samples": f.get("train_samples"),
        "hparams.epochs": f.get("num_epochs"),
        "hparams.lr": f.get("max_lr", f.get("lr", 1e-3)),
        "scheduler.warmup": _length(f, "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples") or "0",
        "scheduler.start_weight_decay": start,
        "scheduler.end_weight_decay": end,
        "scheduler.weight_decay_incr_style": way,
        **({"scheduler.min_lr": f["min_lr"]} if f.get("min_lr") is not None and style != "constant" else {}),
        **({"scheduler.warmup_init": f["lr_warmup_init"]} if "lr_warmup_init" in f else {}),
        **({"scheduler.horizon": horizon} if horizon else {}),
        **_ramp(f.get("rampup_batch_size")),
    }
    if f.get("step_batch_size_schedule"):
        settings |= {
            "hparams.batch_schedule": f'"{f["step_batch_size_schedule"]}"',
            "hparams.batch_schedule_unit": "samples",
        }
    if decay := _length(f, "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
        settings["scheduler.decay"] = decay
    if style == "WSD" and f.get("lr_wsd_decay_style"):
        settings["scheduler.decay_style"] = f["lr_wsd_decay_style"]
    if _outlives_run(f):
        # Megatron's weight decay changes until the run ends; foundry's, until the later of run and horizon ends.
        settings["scheduler.weight_decay_horizon"] = _length(f, "train_iters") or _length(f, "train_samples")
    if f.get("override_opt_param_scheduler") and f.get("use_checkpoint_opt_param_scheduler"):
        settings["checkpoint.scheduler_on_resume"] = "both"
    return _lines(settings)


def by_hand(f: Case) -> dict[str, Any]:
    """Compute the expected numbers for fields in any unit: `train_iters` in steps, the other values in samples."""
    iters, samples, horizon_iters = f.get("train_iters"), f.get("train_samples"), f.get("max_steps")
    if f.get("num_epochs"):
        in_epochs = int(f["num_epochs"] * f.get("dataset_size", EPOCH))
        samples = min(samples or in_epochs, in_epochs)
    horizon_iters, warmup_iters = horizon_iters or f.get("lr_decay_iters"), f.get("lr_warmup_iters") or 0
    most_steps = max(iters or 0, horizon_iters or 0, warmup_iters)
    most_samples = max(samples or 0, f.get("lr_decay_samples") or 0)
    edges = [0]
    while len(edges) <= most_steps or edges[-1] <= most_samples:
        edges.append(edges[-1] + _size(f, edges[-1]))
    total = max(edge for edge in edges[: iters + 1 if iters else None] if not samples or edge <= samples)
    horizon = edges[horizon_iters] if horizon_iters else f.get("lr_decay_samples") or total
    share, decay = f.get("lr_warmup_fraction"), f.get("lr_wsd_decay_samples")
    if decay_iters := f.get("lr_wsd_decay_iters"):
        ramped = f.get("rampup_batch_size")
        decay = horizon - edges[edges.index(horizon) - decay_iters] if ramped else decay_iters * edges[1]
    if f.get("lr_decay_style") == "WSD" and not decay:
        decay = 0.3 * horizon
    return {
        "train_iters": edges.index(total),
        "lr_warmup_steps": share * horizon if share is not None else f.get("lr_warmup_samples") or edges[warmup_iters],
        "lr_decay_steps": horizon,
        "wd_incr_steps": (edges[iters] if iters else samples) if _outlives_run(f) else max(horizon, total),
        "wsd_decay_steps": decay,
    }


@cache
def cases() -> list[Case]:
    """Return the Megatron cases in FOUNDRY_GOLDENS, or in `goldens/` if the variable is not set."""
    return read_cases(FOLDER)


def _size(f: Case, consumed: int) -> int:
    if not f.get("rampup_batch_size"):
        return int(f["global_batch_size"])
    (start, increment, over), final = f["rampup_batch_size"], int(f["global_batch_size"])
    each = over / ((final - start) // increment)
    return final if consumed > over else int(start + increment * int(consumed / each))


def _outlives_run(f: Case) -> bool:
    """Return True if `max_steps` is unset and the horizon exceeds the length of the run given in the same unit."""
    pairs = ("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")
    return f.get("max_steps") is None and any((f.get(a) or 0) > (f.get(b) or 0) > 0 for a, b in pairs)


def _ramp(values: list[int] | None) -> dict[str, Any]:
    if values is None:
        return {}
    if len(values) > 3:
        return {"hparams.batch_ramp": f"[{','.join(map(str, values))}]"}
    return {f"hparams.batch_ramp.{n}": v for n, v in zip(("start", "increment", "over_samples"), values, strict=False)}


def _length(f: Case, *names: str) -> str | None:
    """Format lengths for foundry, or return None if all are unset; a warmup or WSD decay of 0 counts as unset."""
    settings = []
    for name in names:
        value = f.get(name)
        if name.endswith("fraction") and value is not None:
            text = format(Decimal(repr(float(value))), "f")
            settings.append(text if "." in text else f"{text}.0")
        elif value or (value == 0 and name in ("max_steps", "lr_decay_iters", "lr_decay_samples")):
            settings.append(f"{value} samples" if name.endswith("samples") else f"{value} steps")
    return f'"{" and ".join(settings)}"' if settings else None


def _final(text: str) -> int:
    try:
        return BatchSizes.parse(text).final
    except ValueError:
        return 32


def _lines(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
