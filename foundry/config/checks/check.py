"""Entry point of all checks of a composed configuration: choices, field bounds, schema checks, cross-group rules."""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.checks.group_checks import GroupCheck, GroupChecks
from foundry.config.checks.rules import rules
from foundry.config.checks.rungs import check_rungs
from foundry.config.checks.targets import check_own_launcher
from foundry.config.composition.base import expand_base
from foundry.config.composition.former_defaults import keep_former_defaults
from foundry.config.composition.start_dir import check_folders
from foundry.config.composition.store import fill_missing_parts
from foundry.config.diagnostics.missing_values import check_hydra
from foundry.config.environment import Launch, detect
from foundry.config.metrics import check_sweeper
from foundry.config.record.secrets import check_secrets, has_secret
from foundry.config.schemas.launcher import check_launcher, resolve_num_tasks
from foundry.config.schemas.root import Config
from foundry.config.setting import OutOfBounds, guarded
from foundry.core.errors import ConfigError, Violation, first_line
from foundry.core.tasks import pins


def check(composed: DictConfig, checked: GroupChecks | None = None) -> list[Violation]:
    """Return the violations of a composed configuration in a fixed order; bounds and rules only if no value is missing.

    This first modifies the configuration: a run that has begun keeps former defaults, `model=base` is replaced by the
    model that it loads, and tasks replace values that may have another meaning later, such as the last checkpoint of
    another run.

    Args:
        composed: the configuration.
        checked: checks of groups that other configurations have in common with this one; new checks are added.
    """
    try:
        environment = detect()
    except ConfigError as error:
        return list(error.violations)
    choices = list(_check_choices(composed))
    if not choices:
        fill_missing_parts(composed)
        keep_former_defaults(composed)
    base_errors = [] if choices else expand_base(composed) or [wrong for pin in pins() for wrong in pin(composed)]
    unusable = {violation.key for violation in choices} | ({"model"} if base_errors else set())
    keys = [str(key) for key in composed if key != "hydra" and key not in unusable]
    check_group = GroupCheck if checked is None else checked.check
    groups = {key: check_group(composed, key) for key in keys}
    missing = [hole for group in groups.values() for hole in group.missing]
    if violations := [*choices, *base_errors, *missing, *check_hydra(composed)]:
        return violations
    names = [item.name for item in fields(Config)]
    try:
        config = Config(**{name: groups[name].settings for name in names})
    except OmegaConfBaseException as error:  # an invalid value in a user-defined part
        return [Violation(str(error.full_key or "configuration"), first_line(str(error)))]
    out_of_bounds = [violation for name in names for violation in groups[name].out_of_bounds]
    guarded_config = _guard_config(config, {violation.key for violation in out_of_bounds})
    secrets = [*(groups[name].has_secret for name in names), has_secret(composed, "hydra")]
    key_violations = [
        *(check_secrets(composed) if any(secrets) else ()),
        *out_of_bounds,
        *(violation for name in names for violation in groups[name].in_plain_nodes),
        *_check_parts(guarded_config),
        *check_folders(composed),
        *check_launcher(composed),
        *check_own_launcher(composed),
        *_until_out_of_bounds(partial(check_sweeper, composed, guarded_config)),
    ]
    launch = Launch(environment, resolve_num_tasks(composed), guarded_config.distributed)
    rule_violations = list(_check_rules(composed, guarded_config, launch))
    invalid_keys = {violation.key for violation in key_violations}
    # Drop violations of rules that mention an invalid key, or whose own key is a group with an invalid key.
    return key_violations + [
        v for v in rule_violations if not any(key in str(v) or key.startswith(v.key) for key in invalid_keys)
    ]


def _check_parts(config: Config) -> Iterator[Violation]:
    """Yield the violations that the parts of a configuration find in their own fields."""
    for part in (getattr(config, item.name) for item in fields(config)):
        if hasattr(part, "check"):
            yield from _until_out_of_bounds(part.check)


def _check_rules(composed: DictConfig, config: Config, launch: Launch) -> Iterator[Violation]:
    """Yield the violations of the rules across parts."""
    for rule in rules(config):
        yield from _until_out_of_bounds(partial(rule, config, launch))
    yield from _until_out_of_bounds(partial(check_rungs, composed, config, launch))


def _guard_config(config: Config, invalid_keys: Collection[str]) -> Config:
    """Return the configuration with guards that raise `OutOfBounds` if a value at a key in `invalid_keys` is read."""
    return Config(
        **{item.name: guarded(getattr(config, item.name), invalid_keys, item.name) for item in fields(config)}
    )


def _until_out_of_bounds(check: Callable[[], Iterator[Violation]]) -> Iterator[Violation]:
    """Yield the violations of a check until the check reads an out-of-bounds value, since later results are invalid."""
    with suppress(OutOfBounds):
        yield from check()


def _check_choices(composed: DictConfig) -> Iterator[Violation]:
    """Check that each group has exactly one option.

    Hydra accepts a list of options for a group: it merges them and records no choice.
    """
    choices = set(OmegaConf.select(composed, "hydra.runtime.choices") or {})
    override_node = OmegaConf.select(composed, "hydra.overrides.task")
    # Read the content: iterating over the node would resolve interpolations in the overrides.
    raw = [] if override_node is None else override_node._content
    overrides = [str(override._value()).lstrip("+") for override in raw]
    for group in (item.name for item in fields(Config)):
        if group not in choices and any(override.startswith(f"{group}=[") for override in overrides):
            yield Violation(group, "takes one option; to sweep over several add -m and leave out the brackets")
        elif group not in choices and any(line.partition("=")[0] == f"~{group}" for line in overrides):
            yield Violation(group, f"cannot be removed; leave out ~{group}, or choose an option as {group}=...")
