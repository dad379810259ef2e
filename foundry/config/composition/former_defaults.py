"""Defaults that have changed, which stay as they were for a run that began with the former ones.

So the same command continues a run after an update of foundry. A value that the user types, and a value other than the
current default, are never replaced.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from foundry.config.composition.implied_options import DEFAULT_HPARAMS
from foundry.config.composition.store import writable
from foundry.config.record.frozen import read_recorded
from foundry.config.schemas.scheduler import Cosine, Linear
from foundry.run_dir.checkpoints import run_of


@dataclass(frozen=True)
class FormerDefault:
    """A setting whose value in an option has changed.

    Attributes:
        choice: group and option that set it, such as `model=transformer`.
        key: dotted key of the setting.
        former: former value; also the value of a run whose record lacks the setting. If a key has had several values,
            the first of them.
        current: value of this version.
    """

    choice: str
    key: str
    former: Any
    current: Any


FORMER_DEFAULTS = (
    FormerDefault("model=transformer", "model.qk_norm", former=False, current=True),
    FormerDefault("model=transformer", "model.zero_init_outputs", former=False, current=True),
    FormerDefault("optimizer=muon", "optimizer.beta1", former=0.9, current=0.5),
    FormerDefault("optimizer=muon", "optimizer.beta1", former=0.8, current=0.5),
    FormerDefault("optimizer=muon", "optimizer.beta2", former=0.95, current=0.99),
    FormerDefault("optimizer=muon", "optimizer.momentum_warmup_start", former=None, current=0.85),
    FormerDefault("optimizer=muon", "optimizer.groups.embeddings.lr_mult", former=1.0, current=12.0),
    FormerDefault("optimizer=muon", "optimizer.groups.embeddings.lr_mult", former=20.0, current=12.0),
    FormerDefault("optimizer=muon", "optimizer.groups.head.lr_mult", former=1.0, current=2.0),
)


def keep_former_defaults(composed: DictConfig) -> None:
    """Replace changed defaults by the former ones, for a run directory or checkpoint that records the former ones."""
    try:
        recorded = _read_record(composed)
        if recorded is None:
            return
        choices: Mapping[str, str] = OmegaConf.select(composed, "hydra.runtime.choices") or {}
        typed = _typed_keys(composed)
        for default in FORMER_DEFAULTS:
            group, _, option = default.choice.partition("=")
            if choices.get(group) == option and _is_kept(default, composed, recorded, typed):
                OmegaConf.update(composed, default.key, default.former)
        if choices.get("hparams") == DEFAULT_HPARAMS and "scheduler" not in typed:
            _keep_cosine(composed, recorded)
    except OmegaConfBaseException:  # reported by the checks of the composed configuration
        return


def _read_record(composed: DictConfig) -> dict[str, Any] | None:
    """Return the recorded configuration of the run that a configuration continues; None if it begins one."""
    resume, run_dir = (OmegaConf.select(composed, key) for key in ("checkpoint.resume", "hydra.run.dir"))
    if run_dir is None or resume == "never":
        return None
    recorded = read_recorded(Path(str(run_dir)))
    if recorded is None and resume not in (None, "auto"):
        recorded = read_recorded(run_of(Path(str(resume))))
    return recorded


def _typed_keys(composed: DictConfig) -> set[str]:
    overrides = OmegaConf.select(composed, "hydra.overrides.task")
    lines = [] if overrides is None else [str(node._value()) for node in overrides._content]
    return {line.lstrip("+~").partition("=")[0] for line in lines}


def _is_kept(default: FormerDefault, composed: DictConfig, recorded: Mapping[str, Any], typed: Collection[str]) -> bool:
    """Return whether a setting has its current default untouched, and the record has the former default."""
    group, *names = default.key.split(".")
    if any(".".join([group, *names[:end]]) in typed for end in range(1, len(names) + 1)):
        return False
    value: Any = recorded.get(group)
    if not isinstance(value, Mapping) or value.get("_target_") != composed[group].get("_target_"):
        return False
    for name in names:
        value = value.get(name, default.former) if isinstance(value, Mapping) else default.former
    return bool(value == default.former and OmegaConf.select(composed, default.key) == default.current)


def _keep_cosine(composed: DictConfig, recorded: Mapping[str, Any]) -> None:
    """Replace the linear schedule of `hparams=llm` by the former cosine schedule, with the same settings."""
    former = recorded.get("scheduler")
    if not isinstance(former, Mapping) or former.get("_target_") != Cosine._target_:
        return
    if OmegaConf.get_type(composed, "scheduler") is not Linear:
        return
    scheduler = writable(Cosine)
    for item in fields(Linear):
        if item.name != "_target_":
            scheduler[item.name] = composed.scheduler._get_node(item.name)
    with open_dict(composed):
        composed.scheduler = scheduler
