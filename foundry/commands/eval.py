"""`python -m foundry.eval run=DIR`: loss, exact match, reward, tasks of a language model; success of a policy."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from foundry.config.command import (
    check_output,
    check_writable,
    command,
    folder_option,
    print_path,
    quoted,
    refuse_given,
)
from foundry.config.metrics import EXACT_MATCH, HELD_OUT
from foundry.config.schemas.device import KIND_DOC, DeviceKind
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.core.tasks import TaskEvaluation, evaluations
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import CHAT_TEMPLATE, EVALUATION, TASKS, TOKENIZER
from foundry.run_dir.outputs import has_keys
from foundry.run_dir.strict_json import encode

if TYPE_CHECKING:
    from foundry.engine.restore import Restored

_ANSWERED = f"+evaluation.evaluators.exact_match._target_={EXACT_MATCH}"
"""What an environment is for, where it is composed."""
_FOR_LM_EVAL = ("num_fewshot", "chat")
_EVALUATIONS = evaluations()
_GROUPS = ("data", "objective", "environment", "evaluation", *(group for own in _EVALUATIONS for group in own.groups))
_OF_TASKS: dict[TaskEvaluation, type[Any]] = {own: resolve_name(own.options) for own in _EVALUATIONS}


@dataclass(frozen=True, kw_only=True)
class _OwnOptions:
    """Options of every evaluation."""

    run: str = setting("???", "run directory, or folder of transformers, for which data=... is needed")
    which: str = setting("last", "last, best, or the number of a step")
    tasks: list[str] | None = setting(
        None,
        "what lm_eval measures instead: its tasks by name, YAML files of one's own, or folders of them; needs lm_eval",
    )
    out: str | None = setting(
        None, "new file to write, or an earlier result; null: eval.json in the run directory, of tasks eval_tasks.json"
    )
    ema: bool = setting(True, "use the averaged weights where the run kept them")
    trust: bool = setting(False, "run code that is not foundry's: of parts that config.yaml names, of files of tasks")
    max_samples: int | None = setting(None, "held-out samples and prompts, or of each task; null: all", ge=1)
    max_new_tokens: int = setting(256, "longest answer in tokens", ge=1)
    batch_size: int | None = setting(None, "samples, prompts or episodes at a time; null: as the run has it", ge=1)
    num_fewshot: int | None = setting(None, "of tasks: examples before each question; null: as each says", ge=0)
    chat: bool = setting(False, "of tasks: put what is asked into the model's chat template")
    mlflow: bool = setting(True, "add the numbers to the run in MLflow, where it is kept there")
    uri: str | None = setting(
        None, "MLflow tracking URI; null: that of the run, if it is MLFLOW_TRACKING_URI or the default"
    )
    device: DeviceKind = setting(DeviceKind.auto, KIND_DOC)
    config_dir: str | None = setting(
        None, "folder with options of your own for data=, objective=, environment= and simulator=; null: none"
    )


@dataclass(frozen=True, kw_only=True)
class EvalOptions(*_OF_TASKS.values(), _OwnOptions):  # type: ignore[misc] # as many bases as tasks have evaluations
    """The command's options; besides them it takes data, objective, environment, evaluation and others as runs do."""


_OPTIONS_OF = {own: [item.name for item in fields(options)] for own, options in _OF_TASKS.items()}


def evaluate(options: EvalOptions, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Measure, write and print, and add the numbers to the run in MLflow; returns what is written.

    Args:
        options: of the command.
        overrides: of the groups data and objective, composed as those of a run that starts from this model; of
            environment; of simulator, in which a policy acts instead of in its own; of evaluation.evaluators.

    Raises:
        ConfigError: there is no such run, folder, checkpoint or task, or the data or simulator is not for this model.
    """
    path = folder_option("run", options.run)
    name = EVALUATION if options.tasks is None else TASKS
    out = path / name if options.out is None else folder_option("out", options.out)
    if options.out is not None or out.exists():
        check_output("out", out, own=name, is_earlier=has_keys("checkpoint"))
    elif path.is_dir():
        check_writable("out", path)
    if not overrides:
        refuse_given(options, ("config_dir",), "is given without a group to find there, such as simulator=...")
    own = next((one for one in _EVALUATIONS if (path / one.file).is_file() and _has_only(overrides, one.groups)), None)
    if options.tasks is not None:
        result = _measure_tasks(path, options, overrides)
    elif own is not None:
        _refuse_others(own, path, options, overrides)
        compose = partial(_compose, config_dir=_config_dir(options))
        result = resolve_name(own.measure)(path, options, overrides, compose)
    else:
        _refuse_others(None, path, options, overrides)
        result = _measure_on_data(path, out.parent, options, overrides)
    _write(out, result)
    if options.mlflow:
        _track(path, options.uri, result, overrides)
    return result


def _refuse_others(own: TaskEvaluation | None, path: Path, options: EvalOptions, overrides: Sequence[str]) -> None:
    """Refuse the options and overrides of other tasks' evaluations; `own`: this run's, None: it is measured on data.

    Raises:
        ConfigError: one is given.
    """
    measured = f"{path} is {'measured on data' if own is None else own.described}"
    mine = () if own is None else own.groups
    for other, names in _OPTIONS_OF.items():
        if other is own:
            continue
        for override in overrides:
            if _has_only([override], other.groups) and not _has_only([override], mine):
                key, _, value = override.partition("=")
                raise ConfigError(Violation(key.lstrip("+~"), f"is {value} but is {other.described}, and {measured}"))
        refuse_given(options, names, f"is {other.described}, and {measured}")


def _measure_on_data(path: Path, folder: Path, options: EvalOptions, overrides: Sequence[str]) -> dict[str, Any]:
    """What is measured on held-out data.

    Args:
        path: of the run, or a folder of transformers.
        folder: where evaluators may write.
        options: of the command.
        overrides: as of `evaluate`.

    Raises:
        ConfigError: as `evaluate`.
    """
    import torch

    from foundry.config.record.frozen import hash_config
    from foundry.core.protocols import RunContext
    from foundry.engine.restore import explained
    from foundry.environments.judge import build_judge
    from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic
    from foundry.parallel.process_group import World
    from foundry.training.evaluation import Evaluation

    refuse_given(options, _FOR_LM_EVAL, "is of tasks of lm_eval; give tasks=[...]")
    opened = _open(path, options, overrides)
    config, device = opened.config, opened.device
    judge = build_judge(config.environment)
    run = RunContext(
        config=config,
        config_hash=hash_config(config),
        data=opened.data,
        judge=judge,
        world=World.single(device),
        precision=PrecisionPolicy.from_config(config.precision, device),
        run_dir=path,
    )
    with explained(f"{path} cannot be evaluated", config, "model", "data", "objective"):
        evaluation = Evaluation(
            model=run.precision.prepare(opened.model),
            evaluators=_build_evaluators(opened, options, judge),
            run=run,
            folder=folder,
        )
        arithmetic = fp32_arithmetic(tf32=config.precision.tf32)
        with torch.no_grad(), arithmetic, nullcontext() if judge is None else closing(judge):
            measured, _ = evaluation.measure(0, run.beat)
    found = {name.removeprefix("val_"): value for name, value in measured.items()}
    result = {"checkpoint": opened.checkpoint.name, **_with_perplexity(found, config)}
    most = math.inf if options.max_samples is None else options.max_samples
    rows: dict[str, Any] = {"num_samples": opened.data.validation, "num_prompts": opened.data.prompts}
    return result | {name: min(len(held_out), most) for name, held_out in rows.items()}


def _measure_tasks(path: Path, options: EvalOptions, overrides: Sequence[str]) -> dict[str, Any]:
    """What lm_eval measures, of what `foundry.export` makes of the run, so that others measure the same.

    Raises:
        ConfigError: as `evaluate`; lm_eval is missing, or the model is none of transformers.
    """
    from foundry.commands.task_eval import check_installed, evaluate_tasks, find_tasks, lm_eval_version

    refuse_given(
        options,
        [*chain.from_iterable(_OPTIONS_OF.values()), "max_new_tokens"],
        "is not for tasks, which say what they ask; leave it out",
    )
    if overrides:
        key, _, value = overrides[0].partition("=")
        raise ConfigError(Violation(key.lstrip("+~"), f"is {value} but tasks bring their own data; leave it out"))
    check_installed()
    tasks = find_tasks(options.tasks or [], trust=options.trust)
    import torch

    from foundry.commands.export import ExportOptions, export_checkpoint
    from foundry.config.record.frozen import load_config
    from foundry.parallel.device import choose_device
    from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic

    device, batch_size, amp, tf32 = choose_device(options.device), options.batch_size or 1, None, False
    with TemporaryDirectory(prefix="foundry-eval-") as temporary:
        folder, checkpoint = path, path.name
        if not (path / "config.json").is_file():
            config = load_config(path, trust=options.trust)
            precision = PrecisionPolicy.from_config(config.precision, device)
            amp, tf32 = precision.compute_dtype if precision.is_amp else None, config.precision.tf32
            batch_size = options.batch_size or config.hparams.per_gpu_batch_size
            folder = Path(temporary) / "export"
            wanted = ExportOptions(
                run=str(path),
                out=str(folder),
                which=options.which,
                ema=options.ema,
                trust=options.trust,
                device=options.device,
                merge=True if isinstance(config.peft, LoRA) else None,
            )
            checkpoint = export_checkpoint(wanted).name
        if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
            message = f"are for language models that transformers loads with a tokenizer, and {path} has none"
            raise ConfigError(Violation("tasks", message))
        with torch.no_grad(), fp32_arithmetic(tf32=tf32):
            found = evaluate_tasks(
                folder,
                tasks,
                device=device,
                amp=amp,
                batch_size=batch_size,
                max_samples=options.max_samples,
                num_fewshot=options.num_fewshot,
                chat=options.chat,
            )
    return {"checkpoint": checkpoint, "lm_eval": lm_eval_version(), "tasks": found}


def _config_dir(options: EvalOptions) -> Path | None:
    return None if options.config_dir is None else folder_option("config_dir", options.config_dir)


def _compose(overrides: Sequence[str], config_dir: Path | None) -> Config:
    """Compose a run's configuration, as the command line does."""
    from foundry.commands.library import compose

    return compose(overrides, config_dir=config_dir)


def _write(out: Path, result: dict[str, Any]) -> None:
    """Write and print what was measured."""
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
    """Add what was measured to the run in MLflow, as `eval/loss`, or of a task `eval/sums/acc`.

    What was measured on other data than the run's has their name, too: `eval/test/loss`.
    """
    from foundry.commands.sync import send_metrics
    from foundry.run_dir.checkpoints import NAME

    checkpoint = NAME.fullmatch(str(result["checkpoint"]))
    values = {name: value for name, value in result.items() if isinstance(value, float)}
    for task, of_task in result.get("tasks", {}).items():
        values |= {f"{task}/{name.replace(',', '/')}": value for name, value in of_task["metrics"].items()}
    prefix = "/".join(["eval", *_measured_on(overrides)])
    said = send_metrics(
        path,
        {f"{prefix}/{name}": value for name, value in values.items()},
        step=0 if checkpoint is None else int(checkpoint[1]),
        uri=uri,
    )
    if said is not None:
        sys.stdout.write(f"{said}\n")


def _measured_on(overrides: Sequence[str]) -> list[str]:
    """A name for what overrides put in place of the run's own data or simulator."""
    chosen = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    data = Path(chosen.get("data.path", "").strip("'\"")).stem or chosen.get("data")
    return [name for name in (data, chosen.get("simulator")) if name]


def _open(path: Path, options: EvalOptions, overrides: Sequence[str]) -> "Restored":
    """The model with the data that it is measured on.

    Raises:
        ConfigError: as `evaluate`.
    """
    from foundry.config.record.frozen import load_config
    from foundry.config.sources import download_hint, refuse_urls
    from foundry.engine.restore import Restored, build_part, look_again, restore
    from foundry.parallel.device import choose_device
    from foundry.parts.data import build_data, offered_to_data
    from foundry.parts.model import build_model

    compose = partial(_compose, config_dir=_config_dir(options))
    is_transformers = (path / "config.json").is_file()
    if hint := "" if path.is_dir() else download_hint(options.run):
        raise ConfigError(Violation("run", f"is {options.run} but there is no such folder{hint}"))
    if judging := [override for override in overrides if _has([override], "evaluation")]:
        opened = _open(path, options, [override for override in overrides if override not in judging])
        return replace(opened, config=replace(opened.config, evaluation=compose(judging).evaluation))
    if is_transformers and not any(override.startswith("data=") for override in overrides):
        message = f"is needed: {path} is a folder of transformers, which names none; give data=... and its settings"
        raise ConfigError(Violation("data", message))
    if not is_transformers and (scoring := [override for override in overrides if _has([override], "environment")]):
        opened = _open(path, options, [override for override in overrides if override not in scoring])
        return replace(opened, config=replace(opened.config, environment=compose([*scoring, _ANSWERED]).environment))
    given = ["model=base", f"model.path={quoted(str(path))}", _ANSWERED, *overrides]
    if is_transformers:
        config, device = compose(given), choose_device(options.device)
        return Restored(config, build_model(config).to(device).eval(), build_data(config), path, device)
    restored = restore(path, options.which, ema=options.ema, trust=options.trust, device=options.device)
    if overrides:
        kept = restored.data.kept.values()
        like_the_run = [override for content in kept for override in content.overrides]
        given += [f"model.which={options.which}", f"model.trust={str(options.trust).lower()}"]
        composed = look_again(path, options.which, lambda: compose([*like_the_run, *given]))
        objective = composed.objective if _has(overrides, "objective") else restored.config.objective
        config = replace(restored.config, data=composed.data, objective=objective)
        data = build_data(config)
        for content in kept:
            data = content.applied_to(data)
        return replace(restored, config=config, data=data)
    config = load_config(path, trust=options.trust)
    if not options.trust:
        refuse_urls(config.data, path)
    own = {"tokenizer": path / TOKENIZER, "chat_template": path / CHAT_TEMPLATE}
    files = {name: str(file) for name, file in own.items() if hasattr(config.data, name) and file.is_file()}
    if hasattr(config.data, "cache_dir"):
        files["cache_dir"] = os.environ.get("FOUNDRY_CACHE", ".cache/foundry")
    offered = offered_to_data(config.simulator)
    if files:  # nothing is read from the base's folder, or written where the settings say
        config = replace(config, data=replace(config.data, **files))
    return replace(restored, config=config, data=build_part(config, "data", seed=config.hparams.seed, offered=offered))


def _build_evaluators(opened: "Restored", options: EvalOptions, judge: Any) -> dict[str, Any]:
    """The held-out loss, unless the objective compares with models that are not at hand, exact match and rewards.

    Raises:
        ConfigError: there is nothing to measure.
    """
    from foundry.core.protocols import ComparingObjective
    from foundry.engine.restore import build_part
    from foundry.evaluators.exact_match import ExactMatch
    from foundry.evaluators.held_out import HeldOut
    from foundry.parallel.process_group import World

    config, data = opened.config, opened.data
    size = config.hparams.per_gpu_batch_size if options.batch_size is None else options.batch_size
    common: dict[str, Any] = {"data": data, "per_gpu_batch_size": size, "max_samples": options.max_samples}
    offered = {"world": World.single(opened.device), "tokenizer": data.tokenizer}
    objective = build_part(config, "objective", offered=offered)
    evaluators: dict[str, Any] = {}
    if not isinstance(objective, ComparingObjective):
        evaluators["held_out"] = HeldOut(objective=objective, **common, torchmetrics=_torchmetrics(config, HELD_OUT))
    if data.prompts:
        evaluators["exact_match"] = ExactMatch(
            max_new_tokens=options.max_new_tokens,
            judge=judge,
            torchmetrics=_torchmetrics(config, EXACT_MATCH),
            **common,
        )
    if not evaluators:
        message = f"is {type(objective).__name__}, whose loss needs other models, and the data has no prompts"
        raise ConfigError(Violation("objective", f"{message}; give objective=next_token"))
    return evaluators


def _torchmetrics(config: Any, target: str) -> dict[str, Any]:
    """The metrics of torchmetrics that the configuration gives to evaluators of this `_target_`, by name."""
    from foundry.config.build import build

    nodes = [node for node in config.evaluation.evaluators.values() if node and node["_target_"] == target]
    return {name: build(metric) for node in nodes for name, metric in (node.get("torchmetrics") or {}).items()}


def _with_perplexity(found: dict[str, float], config: Any) -> dict[str, float]:
    """The measurements, after the loss what it is as a perplexity, where it is that of tokens."""
    nats = found.get("cross_entropy", found.get("loss"))
    if nats is None or config.hparams.loss_function != "cross_entropy":
        return found
    perplexity = math.exp(nats) if nats < 700 else math.inf
    return {"loss": found.get("loss", nats), "perplexity": perplexity, **found}


def _has(overrides: Sequence[str], group: str) -> bool:
    return any(override.lstrip("+~").partition("=")[0].partition(".")[0] == group for override in overrides)


def _has_only(overrides: Sequence[str], groups: Sequence[str]) -> bool:
    return all(any(_has([override], group) for group in groups) for override in overrides)


def main() -> None:
    """Evaluate from the command line."""
    composed = [override for override in sys.argv[1:] if any(_has([override], group) for group in _GROUPS)]
    sys.argv[1:] = [override for override in sys.argv[1:] if override not in composed]
    run = partial(evaluate, overrides=composed)
    command(EvalOptions, run, name="foundry.eval", doc=__doc__.split(": ", 1)[1])
