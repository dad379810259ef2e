"""`foundry eval run=DIR` on the validation split: loss, exact match and rewards of answers."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.commands.eval import DATA, Compose, EvalOptions, group_of
from foundry.config.command import quoted
from foundry.config.metrics import EXACT_MATCH, HELD_OUT
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.names import CHAT_TEMPLATE, TOKENIZER

if TYPE_CHECKING:
    from foundry.engine.restore import RestoredRun

_ANSWERED = f"+evaluation.evaluators.exact_match._target_={EXACT_MATCH}"
"""Override that adds the exact-match evaluator, which every configuration with an environment needs."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(EvalOptions):
    """Options of the evaluation on the validation split."""

    max_samples: int | None = setting(None, "validation samples and prompts; null: all", ge=1)
    max_new_tokens: int = setting(256, "maximum length of a completion in tokens", ge=1)


def measure(path: Path, options: DataOptions, overrides: Sequence[str], compose: Compose) -> dict[str, Any]:
    """Evaluate a model on the validation split of its run, or on other data.

    Args:
        path: run directory or transformers folder.
        options: options of the command.
        overrides: overrides of the groups of `DATA`.
        compose: composes overrides.

    Raises:
        ConfigError: the run, folder or checkpoint does not exist, or the data does not fit the model.
    """
    import torch

    from foundry.config.record.frozen import hash_config
    from foundry.core.protocols import RunContext
    from foundry.engine.restore import explained
    from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic
    from foundry.parallel.process_group import World
    from foundry.parts.judge import build_judge
    from foundry.training.evaluation import Evaluation

    restored = _open(path, options, overrides, compose)
    config, device = restored.config, restored.device
    judge = build_judge(config.environment)
    run = RunContext(
        config=config,
        config_hash=hash_config(config),
        data=restored.data,
        judge=judge,
        world=World.single(device),
        precision=PrecisionPolicy.from_config(config.precision, device),
        run_dir=path,
    )
    with explained(f"{path} cannot be evaluated", config, "model", "data", "objective"):
        evaluation = Evaluation(
            model=run.precision.prepare(restored.model),
            evaluators=_build_evaluators(restored, options, judge),
            run=run,
            folder=path,
        )
        arithmetic = fp32_arithmetic(tf32=config.precision.tf32)
        with torch.no_grad(), arithmetic, nullcontext() if judge is None else closing(judge):
            measured, _ = evaluation.measure(0, run.heartbeat)
    metrics = {name.removeprefix("val_"): value for name, value in measured.items()}
    limit = math.inf if options.max_samples is None else options.max_samples
    held_out: dict[str, Any] = {"num_samples": restored.data.validation, "num_prompts": restored.data.prompts}
    counts = {name: min(len(rows), limit) for name, rows in held_out.items()}
    return {"checkpoint": restored.checkpoint.name, **_with_perplexity(metrics, config), **counts}


def _open(path: Path, options: DataOptions, overrides: Sequence[str], compose: Compose) -> "RestoredRun":
    """Return the model with the data to evaluate it on.

    Overrides of data and objective are composed with `model=base`, so that the rules for a run that starts from this
    model refuse data that does not fit the model.

    Raises:
        ConfigError: as `measure`.
    """
    from foundry.config.sources import download_hint

    if hint := "" if path.is_dir() else download_hint(options.run):
        raise ConfigError(Violation("run", f"is {options.run}, which does not exist{hint}"))
    overrides_by_group = {
        group: [override for override in overrides if group_of(override) == group] for group in DATA.groups
    }
    model_overrides = [
        "model=base",
        f"model.path={quoted(str(path))}",
        _ANSWERED,
        *overrides_by_group["data"],
        *overrides_by_group["objective"],
    ]
    parts, environment = dict[str, Any](), overrides_by_group["environment"]
    if (path / "config.json").is_file():
        restored = _open_folder(path, options, [*model_overrides, *environment], compose)
    else:
        restored = _open_run(path, options, model_overrides, overrides_by_group, compose)
        if environment:
            parts["environment"] = compose([*environment, _ANSWERED]).environment
    if overrides_by_group["evaluation"]:
        parts["evaluation"] = compose(overrides_by_group["evaluation"]).evaluation
    return replace(restored, config=replace(restored.config, **parts))


def _open_folder(path: Path, options: DataOptions, overrides: Sequence[str], compose: Compose) -> "RestoredRun":
    """Return the model of a transformers folder with the data that the overrides select."""
    from foundry.engine.restore import RestoredRun
    from foundry.parallel.device import choose_device
    from foundry.parts.data import build_data
    from foundry.parts.model import build_model

    if not any(override.startswith("data=") for override in overrides):
        message = f"is required: the transformers folder {path} names no data; add data=... and its settings"
        raise ConfigError(Violation("data", message))
    config, device = compose(list(overrides)), choose_device(options.device)
    return RestoredRun(config, build_model(config).to(device).eval(), build_data(config), path, device)


def _open_run(
    path: Path,
    options: DataOptions,
    overrides: Sequence[str],
    overrides_by_group: Mapping[str, Sequence[str]],
    compose: Compose,
) -> "RestoredRun":
    """Return the model of a run with its own data, or with the data and objective that the overrides select."""
    from foundry.engine.restore import restore

    restored = restore(path, options.which, ema=options.ema, trust=options.trust, device=options.device)
    keeps_objective = not overrides_by_group["objective"]
    if keeps_objective and not overrides_by_group["data"]:
        return _with_own_data(restored, path, trust=options.trust)
    return _with_data(restored, path, options, overrides, compose, keeps_objective=keeps_objective)


def _with_data(
    restored: "RestoredRun",
    path: Path,
    options: DataOptions,
    overrides: Sequence[str],
    compose: Compose,
    *,
    keeps_objective: bool,
) -> "RestoredRun":
    """Return the run with the data, and without `keeps_objective` the objective, that the overrides select."""
    from foundry.engine.restore import retry_if_replaced
    from foundry.parts.data import build_data

    run_files = restored.data.kept.values()
    run_overrides = [override for content in run_files for override in content.overrides]
    words = [*run_overrides, *overrides, f"model.which={options.which}", f"model.trust={str(options.trust).lower()}"]
    composed = retry_if_replaced(path, options.which, lambda: compose(words))
    objective = restored.config.objective if keeps_objective else composed.objective
    config = replace(restored.config, data=composed.data, objective=objective)
    data = build_data(config)
    for content in run_files:
        data = content.applied_to(data)
    return replace(restored, config=config, data=data)


def _with_own_data(restored: "RestoredRun", path: Path, *, trust: bool) -> "RestoredRun":
    """Return the run with its own data, built with the tokenizer and the chat template of the run directory."""
    from foundry.config.record.frozen import load_config
    from foundry.config.sources import refuse_urls
    from foundry.engine.restore import build_part
    from foundry.parts.data import offered_to_data

    config = load_config(path, trust=trust)
    if not trust:
        refuse_urls(config.data, path)
    paths = {"tokenizer": path / TOKENIZER, "chat_template": path / CHAT_TEMPLATE}
    files = {name: str(file) for name, file in paths.items() if hasattr(config.data, name) and file.is_file()}
    if hasattr(config.data, "cache_dir"):
        files["cache_dir"] = os.environ.get("FOUNDRY_CACHE", ".cache/foundry")
    optional = offered_to_data(config.simulator)
    if files:  # so that the data reads no file of the base, and writes no cache to the path in the settings
        config = replace(config, data=replace(config.data, **files))
    return replace(
        restored, config=config, data=build_part(config, "data", seed=config.hparams.seed, optional=optional)
    )


def _build_evaluators(restored: "RestoredRun", options: DataOptions, judge: Any) -> dict[str, Any]:
    """Build evaluators of the loss, if the objective needs no frozen models, and of exact match, if there are prompts.

    Raises:
        ConfigError: the objective needs frozen models, and the data has no prompts.
    """
    from foundry.engine.restore import build_part
    from foundry.evaluators.exact_match import ExactMatch
    from foundry.evaluators.held_out import HeldOut
    from foundry.parallel.process_group import World

    config, data = restored.config, restored.data
    size = config.hparams.per_gpu_batch_size if options.batch_size is None else options.batch_size
    common: dict[str, Any] = {"data": data, "per_gpu_batch_size": size, "max_samples": options.max_samples}
    optional = {"world": World.single(restored.device), "tokenizer": data.tokenizer}
    objective = build_part(config, "objective", optional=optional)
    evaluators: dict[str, Any] = {}
    if objective.compare is None:
        evaluators["held_out"] = HeldOut(objective=objective, **common, torchmetrics=_torchmetrics(config, HELD_OUT))
    if data.prompts:
        evaluators["exact_match"] = ExactMatch(
            max_new_tokens=options.max_new_tokens,
            judge=judge,
            torchmetrics=_torchmetrics(config, EXACT_MATCH),
            **common,
        )
    if not evaluators:
        message = f"is {type(objective).__name__}, whose loss needs a frozen model, and the data has no prompts"
        raise ConfigError(Violation("objective", f"{message}; set objective=next_token"))
    return evaluators


def _torchmetrics(config: Any, target: str) -> dict[str, Any]:
    """Build the torchmetrics metrics by name that the configuration sets for evaluators with this `_target_`."""
    from foundry.config.build import build

    nodes = [node for node in config.evaluation.evaluators.values() if node and node["_target_"] == target]
    return {name: build(metric) for node in nodes for name, metric in (node.get("torchmetrics") or {}).items()}


def _with_perplexity(metrics: dict[str, float], config: Any) -> dict[str, float]:
    """Insert the perplexity after the loss, if the loss was measured and `hparams.loss_function` is cross_entropy."""
    nats = metrics.get("cross_entropy", metrics.get("loss"))
    if nats is None or config.hparams.loss_function != "cross_entropy":
        return metrics
    perplexity = math.exp(nats) if nats < 700 else math.inf
    return {"loss": metrics.get("loss", nats), "perplexity": perplexity, **metrics}
