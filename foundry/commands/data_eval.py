"""`foundry eval run=DIR` on the validation split: loss, exact match and rewards of answers."""

import math
import os
from collections.abc import Sequence
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
    from foundry.engine.restore import Restored

_ANSWERED = f"+evaluation.evaluators.exact_match._target_={EXACT_MATCH}"
"""Override that adds the exact-match evaluator, since an environment without one is refused."""


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

    opened = _open(path, options, overrides, compose)
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
            folder=path,
        )
        arithmetic = fp32_arithmetic(tf32=config.precision.tf32)
        with torch.no_grad(), arithmetic, nullcontext() if judge is None else closing(judge):
            measured, _ = evaluation.measure(0, run.beat)
    found = {name.removeprefix("val_"): value for name, value in measured.items()}
    most = math.inf if options.max_samples is None else options.max_samples
    held_out: dict[str, Any] = {"num_samples": opened.data.validation, "num_prompts": opened.data.prompts}
    counts = {name: min(len(rows), most) for name, rows in held_out.items()}
    return {"checkpoint": opened.checkpoint.name, **_with_perplexity(found, config), **counts}


def _open(path: Path, options: DataOptions, overrides: Sequence[str], compose: Compose) -> "Restored":
    """Return the model with the data to evaluate it on.

    Overrides of data and objective are composed with `model=base`, so that the rules for a run from this model refuse
    data that does not fit it.

    Raises:
        ConfigError: as `measure`.
    """
    from foundry.config.sources import download_hint
    from foundry.engine.restore import Restored, restore
    from foundry.parallel.device import choose_device
    from foundry.parts.data import build_data
    from foundry.parts.model import build_model

    if hint := "" if path.is_dir() else download_hint(options.run):
        raise ConfigError(Violation("run", f"is {options.run} but there is no such folder{hint}"))
    chosen = {group: [one for one in overrides if group_of(one) == group] for group in DATA.groups}
    of_model = ["model=base", f"model.path={quoted(str(path))}", _ANSWERED, *chosen["data"], *chosen["objective"]]
    parts = dict[str, Any]()
    if (path / "config.json").is_file():
        if not any(override.startswith("data=") for override in overrides):
            message = f"is required: the transformers folder {path} names no data; add data=... and its settings"
            raise ConfigError(Violation("data", message))
        config, device = compose([*of_model, *chosen["environment"]]), choose_device(options.device)
        opened = Restored(config, build_model(config).to(device).eval(), build_data(config), path, device)
    else:
        opened = restore(path, options.which, ema=options.ema, trust=options.trust, device=options.device)
        if chosen["data"] or chosen["objective"]:
            opened = _with_data(opened, path, options, of_model, compose, keeps_objective=not chosen["objective"])
        else:
            opened = _with_own_data(opened, path, trust=options.trust)
        if chosen["environment"]:
            parts["environment"] = compose([*chosen["environment"], _ANSWERED]).environment
    if chosen["evaluation"]:
        parts["evaluation"] = compose(chosen["evaluation"]).evaluation
    return replace(opened, config=replace(opened.config, **parts))


def _with_data(
    opened: "Restored",
    path: Path,
    options: DataOptions,
    overrides: Sequence[str],
    compose: Compose,
    *,
    keeps_objective: bool,
) -> "Restored":
    """Replace the data by the data that the overrides select."""
    from foundry.engine.restore import look_again
    from foundry.parts.data import build_data

    kept = opened.data.kept.values()
    like_the_run = [override for content in kept for override in content.overrides]
    words = [*like_the_run, *overrides, f"model.which={options.which}", f"model.trust={str(options.trust).lower()}"]
    composed = look_again(path, options.which, lambda: compose(words))
    objective = opened.config.objective if keeps_objective else composed.objective
    config = replace(opened.config, data=composed.data, objective=objective)
    data = build_data(config)
    for content in kept:
        data = content.applied_to(data)
    return replace(opened, config=config, data=data)


def _with_own_data(opened: "Restored", path: Path, *, trust: bool) -> "Restored":
    """Build the data of a run, with the tokenizer and the chat template of its directory."""
    from foundry.config.record.frozen import load_config
    from foundry.config.sources import refuse_urls
    from foundry.engine.restore import build_part
    from foundry.parts.data import offered_to_data

    config = load_config(path, trust=trust)
    if not trust:
        refuse_urls(config.data, path)
    own = {"tokenizer": path / TOKENIZER, "chat_template": path / CHAT_TEMPLATE}
    files = {name: str(file) for name, file in own.items() if hasattr(config.data, name) and file.is_file()}
    if hasattr(config.data, "cache_dir"):
        files["cache_dir"] = os.environ.get("FOUNDRY_CACHE", ".cache/foundry")
    offered = offered_to_data(config.simulator)
    if files:  # do not read from the base's folder, or write to the paths in the settings
        config = replace(config, data=replace(config.data, **files))
    return replace(opened, config=config, data=build_part(config, "data", seed=config.hparams.seed, offered=offered))


def _build_evaluators(opened: "Restored", options: DataOptions, judge: Any) -> dict[str, Any]:
    """Build the evaluators: validation loss, unless the objective needs frozen models, and exact match with rewards.

    Raises:
        ConfigError: there is nothing to evaluate.
    """
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


def _with_perplexity(found: dict[str, float], config: Any) -> dict[str, float]:
    """Insert the perplexity after the loss, if the loss is a cross-entropy of tokens."""
    nats = found.get("cross_entropy", found.get("loss"))
    if nats is None or config.hparams.loss_function != "cross_entropy":
        return found
    perplexity = math.exp(nats) if nats < 700 else math.inf
    return {"loss": found.get("loss", nats), "perplexity": perplexity, **found}
