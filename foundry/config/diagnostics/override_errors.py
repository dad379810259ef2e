"""Search for every error of a failed composition; Hydra stops at the first error."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.default_element import GroupDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from foundry.config.checks.check import check
from foundry.config.checks.group_checks import GroupChecks
from foundry.config.checks.targets import runtime_settings
from foundry.config.composition.base import FIXED_BY_BASE
from foundry.config.composition.choices import open_repository
from foundry.config.composition.hydra_internals import (
    CachingConfigRepository,
    ConfigLoaderImpl,
    IConfigRepository,
    apply_overrides,
)
from foundry.config.composition.store import GROUPS, group_schemas
from foundry.config.diagnostics.expected_value import accepted_options, expected_kind
from foundry.config.diagnostics.file_errors import (
    Composed,
    compose_without_wrong_entries,
    describe_yaml_error,
    in_file,
)
from foundry.config.diagnostics.names import did_you_mean, leaves, meanings, override_for
from foundry.config.diagnostics.other_frameworks import option_hint
from foundry.config.schemas.model import Base
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation, as_text, first_line, nearest

_SEARCHPATH = "hydra.searchpath"
_NO_OVERRIDE = "is not of the form key=value"
_QUOTES = "; quote values with spaces, commas, = or special characters"


def includes_schemas(loader: ConfigLoaderImpl, config_name: str, overrides: list[str]) -> bool:
    """Return True if a primary configuration belongs to foundry, i.e. its defaults lead to `base_config`.

    This also works if the configuration cannot be composed.
    """
    (repo, _) = _repository(loader, config_name, _parse(overrides)[0])
    visited = set[str]()
    pending = [config_name]
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        try:
            loaded = repo.load_config(name)
        except Exception:  # a file that cannot be parsed includes nothing
            continue
        for entry in (loaded.defaults_list if loaded else None) or []:
            option = entry.value if isinstance(entry, GroupDefault) else None
            path = f"{entry.group}/{option}" if isinstance(entry, GroupDefault) else getattr(entry, "path", None)
            pending += [str(path).lstrip("/")]
    return "base_config" in visited


def without_null_choices(loader: ConfigLoaderImpl, config_name: str, overrides: list[str]) -> list[str]:
    """Return the overrides with each null choice, e.g. `debug=null`, in the form that Hydra accepts."""
    parsed, violations = _parse(overrides)
    repo, search_path_errors = _repository(loader, config_name, parsed)
    return overrides if violations or search_path_errors else [choice_line(repo, override) for override in parsed]


def choice_line(repo: IConfigRepository, override: Override) -> str:
    """Return an override in the form that Hydra accepts: `~debug` for `debug=null`, in optional groups."""
    line = str(override.input_line)
    if override.is_delete() or override.is_sweep_override() or override.key_or_group in GROUPS:
        return line
    return f"~{override.key_or_group}" if override.value() is None and _is_choice(repo, override) else line


@dataclass
class SweepCache:
    """Cache of results that the jobs of one sweep share.

    Attributes:
        repo: the options of the groups, read once.
        checked: checks of groups that configurations have in common.
        violations: violations of a configuration, keyed by the overrides that compose it.
    """

    repo: IConfigRepository
    checked: GroupChecks = field(default_factory=GroupChecks)
    violations: dict[tuple[str, ...], list[Violation]] = field(default_factory=dict)

    def check(self, config: DictConfig, overrides: list[str]) -> list[Violation]:
        """Return the violations of a configuration, from the cache if the same overrides were checked before."""
        key = tuple(overrides)
        if key not in self.violations:
            self.violations[key] = check(config, self.checked)
        return self.violations[key]


def find_errors(
    loader: ConfigLoaderImpl,
    config_name: str | None,
    compose: Callable[[list[str]], DictConfig],
    overrides: list[str],
    error: Exception,
    *,
    is_run: bool,
    cache: SweepCache | None = None,
) -> list[Violation]:
    """Explain why composing `overrides` failed with `error`.

    The choices of groups are checked first. Then the other overrides are applied one by one to the configuration that
    the valid choices compose. If there are errors and `is_run` is True, the rules also check the configuration without
    the wrong overrides.

    Args:
        loader: Hydra's loader.
        config_name: name of the primary configuration.
        compose: composes overrides without checks; the composed configuration may be modified.
        overrides: overrides that failed together.
        error: exception raised by composing `overrides`.
        is_run: the overrides are complete, for one run; False for the fixed overrides of a sweep.
        cache: cache shared with other jobs of the same sweep.
    """
    parsed, violations = _parse(overrides)
    if cache is None:
        options, search_path_errors = _repository(loader, config_name, parsed)
        cache = SweepCache(options)
        violations += search_path_errors
    repo = cache.repo
    if config_name is not None and not repo.config_exists(config_name):
        hint = nearest(config_name, repo.get_group_options("", ObjectType.CONFIG))
        return [Violation("--config-name", f"is {as_text(config_name)}, which is not in any folder of options{hint}")]
    valid = [o for o in parsed if o.key_or_group == _SEARCHPATH and not violations]
    choices = [o for o in parsed if _is_choice(repo, o)]
    values = [o for o in parsed if o not in choices and o.key_or_group != _SEARCHPATH]
    for choice in choices:
        errors = list(_check_choice(repo, choice, sweeping=not is_run))
        violations += errors
        if not errors:
            valid.append(choice)
    incomplete = set[str]()
    try:
        config = compose(_lines(valid))
    except Exception as base_error:
        result, file_errors = _without_wrong_files(loader, compose, repo, valid)
        if result.config is None:
            file_errors += _errors_of_single_overrides(loader, compose, repo, valid)
        violations = list(dict.fromkeys([*violations, *file_errors]))
        if result.config is None:
            return violations or [_general_error(base_error)]
        config = result.config
        incomplete = {choice.incomplete for choice in result.choices.values()} - {""}
    for value in values:
        if value.key_or_group.partition(".")[0] in incomplete:
            continue
        errors = list(_apply(repo, config, value, sweeping=not is_run))
        violations += errors
        if not errors:
            valid.append(value)
    if not violations:
        return list(_errors_of_single_overrides(loader, compose, repo, valid)) or [_general_error(error)]
    is_ours = OmegaConf.get_type(config) is Config
    return violations + (cache.check(config, _lines(valid)) if is_run and is_ours and not incomplete else [])


def _without_wrong_files(
    loader: ConfigLoaderImpl,
    compose: Callable[[list[str]], DictConfig],
    repo: IConfigRepository,
    choices: list[Override],
) -> tuple[Composed, list[Violation]]:
    """Compose without the wrong entries of files. Return the result, and a violation for each wrong entry."""
    chosen_groups = {choice.key_or_group for choice in choices}
    result = compose_without_wrong_entries(loader, compose, _lines(choices), repo=repo, chosen_groups=chosen_groups)
    config = OmegaConf.create() if result.config is None else result.config
    violations = [
        in_file(choice.file, violation)
        for choice in result.choices.values()
        for violation in _explain_default(repo, config, choice.override)
    ]
    violations += [in_file(entry.file, _explain(repo, config, entry.override, entry.error)) for entry in result.entries]
    if result.error is not None and (yaml_error := describe_yaml_error(result.error)) is not None:
        violations.append(yaml_error)
    elif result.error is not None and violations:
        violations.append(_general_error(result.error))
    return result, violations


def _explain_default(repo: IConfigRepository, config: DictConfig, choice: Override) -> Iterator[Violation]:
    """Yield the error of an option in a defaults list that does not exist."""
    if choice.key_or_group and not repo.group_exists(choice.key_or_group):
        yield Violation(choice.key_or_group, _unknown_key(repo, config, choice))
        return
    for violation in _check_choice(repo, choice, sweeping=False):
        yield Violation(violation.key or "defaults", violation.message)


def _errors_of_single_overrides(
    loader: ConfigLoaderImpl,
    compose: Callable[[list[str]], DictConfig],
    repo: IConfigRepository,
    overrides: list[Override],
) -> Iterator[Violation]:
    """Yield an error for each override that cannot be composed on its own."""
    folders = [override for override in overrides if override.key_or_group == _SEARCHPATH]
    for override in overrides:
        try:
            compose(_lines([*folders, override]))
        except Exception as error:
            _, file_errors = _without_wrong_files(loader, compose, repo, [*folders, override])
            violation = _general_error(error)
            if violation.key == "configuration":
                violation = Violation(override.get_key_element(), violation.message)
            yield from file_errors or [violation]


def _repository(
    loader: ConfigLoaderImpl, config_name: str | None, parsed: list[Override]
) -> tuple[CachingConfigRepository, list[Violation]]:
    """Return the repository of options, including hydra.searchpath, and any errors in that search path."""
    repo, error = open_repository(loader, config_name, parsed)
    if error is None:
        return repo, []
    if (yaml_error := describe_yaml_error(error)) is not None:
        return repo, [yaml_error]
    return repo, [Violation(_SEARCHPATH, first_line(str(error)).removeprefix(f"{_SEARCHPATH} "))]


def compose_sweep_master(
    loader: ConfigLoaderImpl, config_name: str | None, compose: Callable[[list[str]], DictConfig], overrides: list[str]
) -> DictConfig | None:
    """Compose a sweep's own configuration without fixed settings that only swept options have.

    Hydra composes this configuration with the default options (hydra-core issue 2888). Settings that the default
    options lack are left out here. Each job is composed with all settings, and refused if its own options lack one.

    Returns:
        The configuration; None if no group is swept, since the error then affects every job, or if there are errors
        in the choices of groups or in the syntax of overrides.
    """
    parsed, violations = _parse(overrides)
    repo, search_path_errors = _repository(loader, config_name, parsed)
    choices = [o for o in parsed if o.is_hydra_override() or _is_choice(repo, o)]
    try:
        config = compose(_lines(choices))
    except Exception:  # `find_errors` reports the error
        return None
    swept_keys = [o.key_or_group for o in choices if o.is_sweep_override()]
    swept_keys += OmegaConf.select(config, "hydra.sweeper.params") or {}
    if violations or search_path_errors or not any(map(repo.group_exists, swept_keys)):
        return None
    master = compose(_lines(o for o in parsed if o in choices or not list(_apply(repo, config, o, sweeping=True))))
    with open_dict(master):
        master.hydra.overrides.task = _lines(o for o in parsed if not o.is_hydra_override())
    return master


def _lines(overrides: Iterable[Override]) -> list[str]:
    return [o.input_line for o in overrides if o.input_line is not None]


def _parse(overrides: list[str]) -> tuple[list[Override], list[Violation]]:
    parser = OverridesParser.create()
    parsed = list[Override]()
    violations = list[Violation]()
    for line in overrides:
        try:
            (override,) = parser.parse_overrides([line])
            if override.key_or_group:
                parsed.append(override)
            else:
                violations.append(Violation(as_text(line) or "''", f"{_NO_OVERRIDE}{override_for(line) or _QUOTES}"))
        except HydraException:
            violations.append(Violation(as_text(line) or "''", f"{_NO_OVERRIDE}{override_for(line) or _QUOTES}"))
        except Exception as error:  # such as a number of too many digits, or too deeply nested brackets
            violations.append(Violation(as_text(line), f"cannot be parsed: {first_line(str(error))}"))
    return parsed, violations


def _is_choice(repo: IConfigRepository, override: Override) -> bool:
    """Return True if an override chooses an option of a group instead of setting a value."""
    return repo.group_exists(override.key_or_group) and not isinstance(override.value(), dict)


def _options(repo: IConfigRepository, group: str) -> list[str]:
    return list(repo.get_group_options(group, ObjectType.CONFIG))


def _groups(repo: IConfigRepository) -> list[str]:
    return [g for g in repo.get_group_options("", ObjectType.GROUP) if g not in ("hydra", "schema")]


def _check_choice(repo: IConfigRepository, choice: Override, *, sweeping: bool) -> Iterator[Violation]:
    group, options = choice.key_or_group, _options(repo, choice.key_or_group)
    if choice.is_sweep_override():
        if not sweeping:
            yield _sweep_error(choice)
        if not sweeping or choice.value_type is ValueType.GLOB_CHOICE_SWEEP:
            return
        try:
            value: Any = [v if isinstance(v, str) else str(v) for v in choice.sweep_iterator()]
        except (ValueError, HydraException) as error:
            yield Violation(group, f"is {as_text(choice.get_value_string())}: {first_line(str(error))}")
            return
    else:
        value = choice.value()
    for name in value if isinstance(value, list) else [value]:
        if name is None and choice.is_delete():
            if group in GROUPS:
                yield Violation(group, f"cannot be removed; options: {', '.join(options)}")
        elif name is None and group in GROUPS:
            yield Violation(group, f"cannot be null; options: {', '.join(options)}")
        elif name is not None and str(name) not in options:
            options_text = f"options: {', '.join(options)}" if options else "no options; add your own with --config-dir"
            hint = _local_option_hint(group, str(name)) or option_hint(group, str(name), partial(_options, repo))
            hint = hint or nearest(str(name), options)
            yield Violation(group, f"has no option '{as_text(name)}'{hint} ({options_text})")


def _local_option_hint(group: str, name: str) -> str:
    """Return a hint if a folder below the current one has the option.

    The folder is not used automatically, since it may come from an untrusted source.
    """
    if re.fullmatch(r"[\w-]{1,100}", name):
        for file in sorted(Path.cwd().glob(f"*/{group}/{name}.y*ml")):
            path = file.relative_to(Path.cwd())
            return f"; there is {path} here: add --config-dir {path.parts[0]}"
    return ""


def _sweep_error(override: Override) -> Violation:
    text = as_text(override.get_value_string())
    return Violation(override.key_or_group, f"is {text}: to sweep over it add -m; for a list write [{text}]")


def _apply(repo: IConfigRepository, config: DictConfig, override: Override, *, sweeping: bool) -> Iterator[Violation]:
    """Apply one override to the configuration, or yield its error."""
    if override.is_sweep_override():
        if not sweeping:
            yield _sweep_error(override)
        return
    try:
        apply_overrides([override], config)
    except Exception as error:  # any exception, since OmegaConf does not expect every value
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        yield _explain(repo, config, override, cause)


def _explain(repo: IConfigRepository, config: DictConfig, override: Override, error: Exception) -> Violation:
    key, message = override.key_or_group, str(error)
    if override.is_delete():
        return Violation(key, "cannot be removed; set another value, or null if the setting allows it")
    node = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    if override.is_add() and "An item is already at" in message:
        return Violation(key, "already exists; leave out the +")
    if isinstance(node, DictConfig) and OmegaConf.get_type(node) is not dict:
        return _explain_mapping(repo, override, node, error)
    if isinstance(node, DictConfig) and isinstance(override.value(), dict):
        return Violation(key, f"does not have all of these keys; to add them write +{as_text(override.input_line)}")
    if re.match("Key '.*' (is )?not in|Key '.*' not found|.*does not exist", first_line(message)) or (
        "Could not override" in message or "Could not append" in message
    ):
        return Violation(key, _unknown_key(repo, config, override))
    return explain_value(override, error)


def _explain_mapping(repo: IConfigRepository, override: Override, node: DictConfig, error: Exception) -> Violation:
    """Return the error of a value that was assigned to a node with a schema."""
    key, mapping, names = override.key_or_group, override.value(), [str(name) for name in node]
    if not isinstance(mapping, dict):
        expected = f"a mapping with keys among {', '.join(names)}"
        return Violation(key, f"is {as_text(override.get_value_string())} but must be {expected}")
    unknown = [str(name) for name in mapping if str(name) not in names]
    if unknown:
        path = f"{key}.{unknown[0]}"
        settings, value = [f"{key}.{name}" for name in names], as_text(mapping[unknown[0]])
        hint = did_you_mean(path, settings, value=value, options=partial(_options, repo))
        return Violation(path, f"is not a key of {key}{hint}")
    return explain_value(override, error)


def explain_value(override: Override, error: Exception) -> Violation:
    """Return the violation for a value, derived from OmegaConf's exception."""
    key = override.key_or_group
    value = as_text(override.get_value_string())
    message = str(error)
    if "is not Optional" in message:
        return Violation(key, "cannot be null; it must have a value")
    if "Cannot merge" in message:
        return Violation(
            key, f"is {value} but must be {'a list' if isinstance(override.value(), dict) else 'a mapping'}"
        )
    if (kind := expected_kind(error)) is not None:
        accepted = accepted_options(error)
        hint = option_hint(key.partition(".")[0], value, lambda group: ()) if accepted else ""
        return Violation(key, f"is {value} but must be {kind}{hint or nearest(value, accepted)}")
    return Violation(key, f"cannot be {value}: {first_line(message)}")


def _unknown_key(repo: IConfigRepository, config: DictConfig, override: Override) -> str:
    key = override.key_or_group
    group, _, leaf = key.rpartition(".")
    part = OmegaConf.select(config, group) if leaf in runtime_settings(group) else None
    if isinstance(part, DictConfig) and OmegaConf.get_type(part) is dict:
        return f"is not a key of your own {group}; to add it write +{key}=..."
    if group == "model" and OmegaConf.get_type(config, "model") is Base:
        return FIXED_BY_BASE
    other_options = list(_options_with(repo, group, leaf))
    if other_options:
        return f"is not a setting of the chosen {group}; it belongs to {' and '.join(other_options)}"
    node = OmegaConf.select(config, group) if group.startswith("hydra") else None
    if isinstance(node, DictConfig):
        return f"is not a key of {group}{nearest(key, [f'{group}.{name}' for name in map(str, node)])}"
    value = override.get_value_string()
    groups = () if group else _groups(repo)
    hint = did_you_mean(key, leaves(config), groups, value=value, options=partial(_options, repo))
    return f"is not a key of {group}{hint}" if group else f"is neither a group nor a key{hint}"


def _options_with(repo: IConfigRepository, group: str, leaf: str) -> Iterator[str]:
    """Yield the options of a group whose schema has a field `leaf`, in the form group=option."""
    if group not in GROUPS:
        return
    schemas_with_field = {name for name, schema in group_schemas(group).items() if leaf in schema.__dataclass_fields__}
    for option in _options(repo, group):
        loaded = repo.load_config(f"{group}/{option}")
        defaults = (loaded.defaults_list if loaded else None) or []
        schemas = {str(d.get_name()).rpartition("/")[2] for d in defaults if d.get_name()}
        if schemas & schemas_with_field:
            yield f"{group}={option}"


def _general_error(error: Exception) -> Violation:
    """Return the violation for an error that no single override explains, such as a wrong key in a YAML file."""
    cause = error.__cause__ or error
    text = f"{first_line(str(error))} {first_line(str(cause)) if cause is not error else ''}".strip()
    if not isinstance(error, HydraException | OmegaConfBaseException):
        text = f"{type(error).__name__}: {text}"
    location = re.search(r"In '([^']*)'", str(error))
    key = re.search(r"full_key: (\S+)", str(cause)) or re.search(r"full_key: (\S+)", str(error))
    hint = did_you_mean(key[1], meanings()) if key and re.search("Key '.*' (is )?not in", text) else ""
    return Violation(location[1] if location else key[1] if key else "configuration", text + hint)
