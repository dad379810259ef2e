"""Notices about the training method: hyperparameters selected by other options, and a very high learning rate."""

import logging
from collections.abc import Mapping

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.choices import open_repository
from foundry.config.composition.hydra_internals import IConfigRepository
from foundry.config.composition.implied_options import hparams_of_method
from foundry.config.environment import detect
from foundry.config.schemas.hparams import HParams
from foundry.config.schemas.optimizer import SGD
from foundry.run_dir.log import NOTICE

log = logging.getLogger(__name__)

MOST_TIMES = 10.0
"""Multiple of the method's default learning rate above which a warning is logged."""
_LARGE = 1e6
"""Smallest multiple that is formatted with an exponent."""


def log_method(composed: DictConfig) -> None:
    """Log which option of `hparams` other options selected, and warn of a rate far above that option's learning rate.

    Only rank 0 logs. Nothing is logged in the jobs of a sweep, which may search over learning rates.

    Args:
        composed: checked configuration of the job that Hydra is running.
    """
    loader, hydra = GlobalHydra.instance().config_loader(), HydraConfig.get()
    if detect().rank > 0 or hydra.mode is RunMode.MULTIRUN:
        return
    lines = list(hydra.overrides.hydra)
    repo, _ = open_repository(loader, None, OverridesParser.create().parse_overrides(lines))
    is_given = any(str(line).lstrip("+").startswith("hparams=") for line in hydra.overrides.task)
    if not is_given and (notice := describe_implied_hparams(composed, repo, hydra.runtime.choices)) is not None:
        log.log(NOTICE, "%s", notice)
    if (warning := describe_high_rate(composed, repo, hydra.runtime.choices["hparams"])) is not None:
        log.warning("%s", warning)


def describe_implied_hparams(composed: DictConfig, repo: IConfigRepository, options: Mapping[str, str]) -> str | None:
    """Return a line about the chosen option of `hparams`; None unless another chosen option selects it.

    Args:
        composed: the configuration.
        repo: repository of the config groups.
        options: selected option of each group.
    """
    hparams = composed.hparams
    method_option, group = hparams_of_method(repo, options)
    if method_option is None or method_option != options["hparams"]:
        return None
    units = {"epochs": "epoch", "max_steps": "step", "train_samples": "sample"}
    lengths = [(hparams[key], unit) for key, unit in units.items() if hparams[key] is not None]
    budget = " or ".join(f"{length:g} {unit}{'' if length == 1 else 's'}" for length, unit in lengths)
    rate = f"optimizer={options['optimizer']}, hparams.lr={hparams.lr:g}, {hparams.global_batch_size} samples a step"
    return f"{group}={options[group]} selects hparams={method_option}: {rate}, {budget}"


def describe_high_rate(composed: DictConfig, repo: IConfigRepository, option: str) -> str | None:
    """Return a warning if the learning rate is more than `MOST_TIMES` times the default of `hparams=option`.

    Returns None for SGD, because its learning rates are not comparable to the learning rates of adaptive optimizers.
    """
    lr, default = float(composed.hparams.lr), default_lr(composed, repo, option)
    if lr <= MOST_TIMES * default or composed.optimizer.get("_target_") == SGD._target_:
        return None
    ratio = lr / default
    times = f"{ratio:{',.0f' if ratio < _LARGE else '.2g'}} times the default of hparams={option}, {default:g}"
    return f"hparams.lr={lr:g} is {times}: a learning rate this high may diverge or damage a pretrained base"


def default_lr(composed: DictConfig, repo: IConfigRepository, option: str) -> float:
    """Return the default learning rate of an option of `hparams`, with all other groups as in the configuration.

    Args:
        composed: the configuration.
        repo: repository of the config groups.
        option: name of the option, which may extend another option.
    """
    loaded = repo.load_config(f"hparams/{option}")
    hparams = None if loaded is None else OmegaConf.select(loaded.config, "hparams", throw_on_resolution_failure=False)
    if isinstance(hparams, DictConfig) and (node := hparams._get_node("lr")) is not None:
        copy = composed.copy()
        OmegaConf.update(copy, "hparams.lr", node._value())
        return float(copy.hparams.lr)
    for entry in (loaded and loaded.defaults_list) or ():
        name = entry.get_name()
        if name is not None and "/" not in name and name not in ("_self_", option) and entry.is_override() is False:
            return default_lr(composed, repo, name)
    return HParams().lr
