"""Jobs of a sweep as points of a scaling law: parameters, tokens and final held-out loss."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from foundry.config.record.frozen import read_recorded
from foundry.config.record.resume_compat import Difference
from foundry.config.setting import OnResume
from foundry.core.errors import ConfigError, Violation, as_text, counted, format_reason, listed
from foundry.run_dir.names import PLAN, RESULT, TOKENIZER
from foundry.run_dir.strict_json import DamagedFileError, flat, read_optional
from foundry.sweeps.reading import JobReport, SweepReport
from foundry.sweeps.scaling.law import FLOPS_PER_PARAMETER_AND_TOKEN
from foundry.sweeps.seeds import is_seed

ParameterCounter = Callable[[Path], tuple[int, int]]
"""Function of a run directory; returns the number of parameters without embeddings and head, and of all parameters."""

_BUDGET = ("hparams.max_steps", "hparams.epochs", "hparams.train_samples")
_COMPARED: Mapping[str, tuple[str, ...] | None] = {
    "data": None,
    "objective": None,
    "hparams": ("loss_function", "z_loss_coefficient"),
    "evaluation": ("max_samples",),
}
"""Groups, and settings in them, that must be equal for losses to be comparable; None for all settings of a group."""
_MOST_JOBS, _MOST_KEYS = 8, 3


class Parameters(Enum):
    """Parameters that count as N."""

    non_embedding = "non_embedding"
    total = "total"


@dataclass(frozen=True)
class Run:
    """A finished job.

    Attributes:
        job: the job.
        non_embedding_parameters: parameters without embeddings and without the output head.
        total_parameters: all parameters.
        parameters: N in the law, which is one of both counts.
        tokens: tokens trained, D in the law.
        loss: final held-out loss.
        epochs: passes over the training data; None if plan.json does not have it.
    """

    job: JobReport
    non_embedding_parameters: int
    total_parameters: int
    parameters: int
    tokens: int
    loss: float
    epochs: float | None

    @property
    def point(self) -> tuple[int, int]:
        """N and D."""
        return self.parameters, self.tokens

    @property
    def flops(self) -> float:
        """C = 6 N D."""
        return float(FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens)


@dataclass(frozen=True)
class Selection:
    """Jobs of a sweep by their use in a fit.

    Attributes:
        fitted: runs of the fit.
        held_out: runs that the fit does not see.
        excluded: other jobs, each with the reason.
    """

    fitted: tuple[Run, ...]
    held_out: tuple[Run, ...]
    excluded: tuple[tuple[JobReport, str], ...]

    def notes(self, names: Sequence[str]) -> list[str]:
        """Return remarks on the fitted runs.

        Args:
            names: keys whose values differ between the jobs of the sweep.
        """
        keys = [
            key
            for key in names
            if not key.startswith("model.")
            and key not in _BUDGET
            and not is_seed(key)
            and len({run.job.values.get(key) for run in self.fitted}) > 1
        ]
        notes = list[str]()
        if keys:
            notes.append(f"the jobs also differ in {', '.join(keys)}; the law assumes the best value for each N and D")
        if repeated := [run for run in self.fitted if run.epochs is not None and run.epochs > 1]:
            most = max(run.epochs or 0.0 for run in repeated)
            notes.append(
                f"{counted(len(repeated), 'job')} trained for more than one epoch, up to {most:.3g}; the law counts "
                "repeated tokens like new ones"
            )
        return notes


def select_runs(
    sweep: SweepReport,
    count: ParameterCounter,
    *,
    metric: str,
    parameters: Parameters,
    exclude: Sequence[str],
    hold_out: Sequence[str],
) -> Selection:
    """Read the finished jobs of a sweep, and list the other jobs with their reasons.

    Args:
        sweep: the sweep.
        count: counts the parameters of a run.
        metric: name of the held-out loss in result.json.
        parameters: parameters that count as N.
        exclude: patterns of jobs to leave out: number, directory or swept override, with wildcards.
        hold_out: patterns of jobs that are not fitted.

    Raises:
        ConfigError: a pattern matches no job, or losses are not comparable, since settings of data, tokenizer or loss
            differ between jobs.
    """
    jobs = sorted(sweep.jobs, key=lambda job: job.index)
    _check_patterns("exclude", exclude, jobs)
    _check_patterns("hold_out", hold_out, jobs)
    runs, excluded = list[Run](), list[tuple[JobReport, str]]()
    for job in jobs:
        if pattern := _match(exclude, job):
            excluded.append((job, f"matches exclude={pattern}"))
            continue
        run = _read_run(job, count, metric, parameters)
        if isinstance(run, Run):
            runs.append(run)
        else:
            excluded.append((job, run))
    _check_comparable(sweep.folder, runs)
    held_out = tuple(run for run in runs if _match(hold_out, run.job))
    for job, reason in excluded:
        if _match(hold_out, job) and not _match(exclude, job):
            raise ConfigError(Violation("hold_out", f"selects job {job.index}, which cannot be compared: {reason}"))
    return Selection(tuple(run for run in runs if run not in held_out), held_out, tuple(excluded))


def _check_patterns(key: str, patterns: Sequence[str], jobs: Sequence[JobReport]) -> None:
    for pattern in patterns:
        if not any(_match([pattern], job) for job in jobs):
            message = f"is {as_text(pattern)}, which matches no job; give the number or directory of a job, or one of "
            raise ConfigError(Violation(key, f"{message}its overrides such as 'model.hidden_size=64'; * is a wildcard"))


def _match(patterns: Sequence[str], job: JobReport) -> str | None:
    """Return the first pattern that matches a job; None if no pattern does."""
    names = [str(job.index), job.job.dir, *job.job.swept, *(f"{key}={value}" for key, value in job.values.items())]
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), None)


def _read_run(job: JobReport, count: ParameterCounter, metric: str, parameters: Parameters) -> Run | str:
    """Return the run of a job, or the reason to leave the job out."""
    if job.state != "finished":
        return f"{job.state}: {job.note}" if job.note else job.state
    if job.is_pruned:
        return job.note
    result, tokens = job.result, job.result.get("tokens")
    step, loss = result.get("step"), result.get(metric)
    if not result:
        return job.note or f"has no {RESULT}"
    if not isinstance(loss, int | float) or isinstance(loss, bool):
        return f"has no {metric} in {RESULT}"
    if not math.isfinite(loss) or loss <= 0:
        return f"has {metric}={loss:g}, which has no logarithm"
    if not isinstance(tokens, int) or tokens <= 0:
        return f"has no tokens in {RESULT}; a law needs the number of trained tokens"
    if job.total_steps is not None and isinstance(step, int) and step < job.total_steps:
        return f"stopped at step {step} of {job.total_steps}, before the end of its learning-rate schedule"
    config = read_recorded(job.run_dir)
    if config is None:
        return "has no readable config.yaml"
    peft = config.get("peft")
    if isinstance(peft, dict) and peft.get("method", "none") != "none":
        return f"trains adapters (peft.method={as_text(peft['method'])})"
    try:
        non_embedding, total = count(job.run_dir)
        epochs = read_optional(job.run_dir / PLAN).get("total_epochs")
    except DamagedFileError as error:
        return f"{PLAN} {error.reason}"
    except ConfigError as error:
        return format_reason(error)
    chosen = non_embedding if parameters is Parameters.non_embedding else total
    if chosen <= 0:
        return f"has no {parameters.value} parameters; set parameters=total"
    return Run(job, non_embedding, total, chosen, tokens, loss, epochs if isinstance(epochs, float) else None)


def _check_comparable(folder: Path, runs: Sequence[Run]) -> None:
    """Refuse runs whose data, tokenizer or loss differ, except in settings that leave every update the same.

    Raises:
        ConfigError: names the settings and the jobs with each value.
    """
    settings = [_compared_settings(run.job.run_dir) for run in runs]
    violations = list[Violation]()
    for key in dict.fromkeys(key for each in settings for key in each):
        groups: dict[str, tuple[str, list[int]]] = {}
        for run, each in zip(runs, settings, strict=True):
            text = as_text(each[key]) if key in each else "not set"
            groups.setdefault(repr(each.get(key)) if key in each else "", (text, []))[1].append(run.job.index)
        if len(groups) == 1 or Difference(key, None, None).on_resume is OnResume.same:
            continue
        texts = [f"{text} (job{'s' * (len(jobs) > 1)} {listed(jobs, _MOST_JOBS)})" for text, jobs in groups.values()]
        message = f"is {folder}, whose jobs differ in {key}: {listed(texts, _MOST_KEYS)}; "
        violations.append(Violation("dir", f"{message}their losses are not comparable: exclude= all but one group"))
    if violations:
        raise ConfigError(violations[:_MOST_KEYS])


def _compared_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings and the digest of the tokenizer that must be equal, by dotted name."""
    config = read_recorded(run_dir) or {}
    values = dict[str, Any]()
    for group, names in _COMPARED.items():
        node = config.get(group)
        if isinstance(node, dict):
            chosen = {name: value for name, value in node.items() if names is None or name in names}
            values |= dict(flat(chosen, f"{group}."))
    tokenizer = run_dir / TOKENIZER
    if tokenizer.is_file():
        values[TOKENIZER] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:12]
    return values
