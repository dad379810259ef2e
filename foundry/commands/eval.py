"""`foundry eval run=DIR`: measure loss, exact match, reward or tasks of a language model, or success of a policy."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from foundry.config.command import (
    Outcome,
    check_output,
    check_writable,
    folder_option,
    option_lines,
    parse_options,
    print_path,
    require_out,
    run_option,
    run_words,
    usage,
)
from foundry.config.schemas.device import KIND_DOC, DeviceKind
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.core.tasks import TaskEvaluation, evaluations
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import EVALUATION, TASKS
from foundry.run_dir.outputs import has_keys
from foundry.run_dir.strict_json import encode

_ROOM = "foundry.commands"
DATA = TaskEvaluation(
    measure=f"{_ROOM}.data_eval:measure",
    options=f"{_ROOM}.data_eval:DataOptions",
    groups=("data", "objective", "environment", "evaluation"),
    described="on data",
)
LM_EVAL = TaskEvaluation(
    measure=f"{_ROOM}.task_eval:measure",
    options=f"{_ROOM}.task_eval:TaskOptions",
    described="with tasks of lm_eval, tasks=[...]",
)
_NO_TASKS = "tasks=null"

Compose = Callable[[Sequence[str]], Config]
"""Function that composes overrides as for a run, including the options in `config_dir`."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options common to all evaluations."""

    run: str = setting("???", "run directory, the URL of its mirror, or a transformers folder, which needs data=...")
    which: str = setting("last", "checkpoint: last, best, or the number of a step")
    out: str | None = setting(
        None,
        "output file: new, or an earlier result; null: eval.json in the run directory, or eval_tasks.json for tasks",
    )
    ema: bool = setting(True, "use the averaged weights, if the run has them")
    trust: bool = setting(False, "run code that is not part of foundry: parts in config.yaml, and files of tasks")
    batch_size: int | None = setting(None, "samples, prompts or episodes at a time; null: as in the run", ge=1)
    mlflow: bool = setting(True, "add the results to the MLflow run, if there is one")
    uri: str | None = setting(None, "MLflow tracking URI; null: the run's, if it is MLFLOW_TRACKING_URI or the default")
    device: DeviceKind = setting(DeviceKind.auto, KIND_DOC)
    config_dir: str | None = setting(
        None, "folder with your own options for data=, objective=, environment= and simulator=; null: none"
    )


def evaluate(words: Sequence[str]) -> dict[str, Any]:
    """Evaluate, write and print the result, and add the numbers to the run in MLflow; return the result.

    Args:
        words: `key=value` arguments: options of the evaluation that the run and `tasks` select, and overrides of the
            groups that this evaluation accepts.

    Raises:
        ConfigError: an option is invalid or belongs to another evaluation; the run, folder, checkpoint or task does not
            exist; or the data or simulator does not fit the model.
    """
    words = [word for word in words if word != _NO_TASKS]
    run = _run_of(words)
    evaluation = _choose(words, run)
    overrides = [word for word in words if group_of(word) in evaluation.groups]
    option_words = [word for word in words if word not in overrides]
    options = parse_options(_schema(evaluation), option_words, refusals=_refusals(evaluation, run))
    require_out(options.run, options.out)
    path = run_option("run", options.run, options.which)
    name = TASKS if evaluation is LM_EVAL else EVALUATION
    out = path / name if options.out is None else folder_option("out", options.out)
    if options.out is not None or out.exists():
        check_output("out", out, own_name=name, is_earlier=has_keys("checkpoint"))
    elif path.is_dir():
        check_writable("out", path)
    if options.config_dir is not None and not overrides:
        message = f"is {options.config_dir} but no override uses it; add one, such as simulator=..., or leave it out"
        raise ConfigError(Violation("config_dir", message))
    config_dir = None if options.config_dir is None else folder_option("config_dir", options.config_dir)
    result: dict[str, Any] = resolve_name(evaluation.measure)(path, options, overrides, partial(_compose, config_dir))
    _write(out, result)
    if options.mlflow:
        _track(path, options.uri, result, overrides)
    return result


def options_for(words: Sequence[str]) -> tuple[type[Any], tuple[str, ...]]:
    """Return the options class of the evaluation that the arguments select, and the groups it accepts overrides of."""
    evaluation = _choose(words, _run_of(words))
    return _schema(evaluation), evaluation.groups


def group_of(override: str) -> str:
    """Return the first part of the key of an override."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def _choose(words: Sequence[str], run: Path | None) -> TaskEvaluation:
    """Select the evaluation: lm_eval tasks if `tasks` is given, else the evaluation of the run's task, else `DATA`.

    `DATA` also applies if the evaluation of the run's task does not accept all overridden groups.
    """
    keys = {group_of(word) for word in words}
    if "tasks" in keys:
        return LM_EVAL
    groups = keys & {group for evaluation in (DATA, *evaluations()) for group in evaluation.groups}
    candidates = (evaluation for evaluation in evaluations() if run is not None and (run / evaluation.file).is_file())
    return next((evaluation for evaluation in candidates if groups <= set(evaluation.groups)), DATA)


def _run_of(words: Sequence[str]) -> Path | None:
    """Return the folder in `run=`; None if it is missing or `parse_options` would refuse it."""
    for word in words:
        if word.startswith("run="):
            with suppress(HydraException, ConfigError):
                return run_option("run", str(OverridesParser.create().parse_overrides([word])[0].value()))
    return None


def _schema(evaluation: TaskEvaluation) -> type[Any]:
    """Return the options class of an evaluation, merged with the common options."""
    options: type[Any] = resolve_name(evaluation.options)
    if issubclass(options, EvalOptions):
        return options
    return dataclass(frozen=True, kw_only=True)(type(options.__name__, (options, EvalOptions), {"__doc__": ""}))


def _refusals(evaluation: TaskEvaluation, run: Path | None) -> dict[str, str]:
    """Return options and groups of the other evaluations, with the reason why this evaluation refuses them."""
    reason = f"{run} uses the evaluation {'on data' if evaluation is DATA else evaluation.described}"
    if evaluation is LM_EVAL:
        reason = "tasks bring their own data; leave it out"
    reasons = dict[str, str]()
    for other in (DATA, LM_EVAL, *evaluations()):
        for name in (*(item.name for item in fields(resolve_name(other.options))), *other.groups):
            reasons.setdefault(name, f"belongs to the evaluation {other.described}, and {reason}")
    return reasons


def _compose(config_dir: Path | None, overrides: Sequence[str]) -> Config:
    """Compose the configuration of a run, as the command line does."""
    from foundry.commands.library import compose

    return compose(overrides, config_dir=config_dir)


def _write(out: Path, result: dict[str, Any]) -> None:
    """Write and print the result."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(json.loads(encode(result)), indent=2) + "\n")
    width = max(14, *map(len, result))
    for name, value in result.items():
        if name == "tasks":
            from foundry.commands.task_eval import table

            sys.stdout.write(f"\n{table(value)}\n")
        else:
            sys.stdout.write(f"{name:<{width}} {f'{value:.6g}' if isinstance(value, float) else value}\n")
    print_path(out)


def _track(path: Path, uri: str | None, result: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Add the result to the run in MLflow, as `eval/loss`, or for a task as `eval/sums/acc`.

    The names of results on other data, or in another simulator, include the name of these: `eval/test/loss`.
    """
    from foundry.commands.sync import send_metrics
    from foundry.run_dir.checkpoints import NAME

    checkpoint = NAME.fullmatch(str(result["checkpoint"]))
    values = {name: value for name, value in result.items() if isinstance(value, float)}
    for task, task_result in result.get("tasks", {}).items():
        values |= {f"{task}/{name.replace(',', '/')}": value for name, value in task_result["metrics"].items()}
    prefix = "/".join(["eval", *_data_names(overrides)])
    message = send_metrics(
        path,
        {f"{prefix}/{name}": value for name, value in values.items()},
        step=0 if checkpoint is None else int(checkpoint[1]),
        uri=uri,
    )
    if message is not None:
        sys.stdout.write(f"{message}\n")


def _data_names(overrides: Sequence[str]) -> list[str]:
    """Return the names of the data and of the simulator in the overrides, which replace the run's own."""
    values = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    data = Path(values.get("data.path", "").strip("'\"")).stem or values.get("data")
    return [name for name in (data, values.get("simulator")) if name]


def _page(name: str, doc: str) -> str:
    """Return the help page: the common options, then the options of each evaluation."""
    lines = [*usage(name), "", doc, "", *option_lines(EvalOptions)]
    common = {item.name for item in fields(EvalOptions)}
    for evaluation in (DATA, LM_EVAL, *evaluations()):
        groups = f"; it also accepts overrides of {', '.join(evaluation.groups)}" if evaluation.groups else ""
        lines += [
            "",
            f"Evaluation {evaluation.described}{groups}",
            *option_lines(resolve_name(evaluation.options), omitted=common),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point of the command."""
    name = "foundry.eval"
    run_words(
        lambda words: Outcome(evaluate(words)),
        name=name,
        write_help=lambda: _page(name, __doc__.split(": ", 1)[1]),
    )
