"""Finding every mistake of a composition that failed, where Hydra stops at the first."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from foundry.config.errors import Violation, nearest
from foundry.config.rules import check
from foundry.config.store import GROUPS, group_schemas

HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, AttributeError, AssertionError)
"""What Hydra's loader raises for a wrong configuration; the last two where OmegaConf did not expect one."""

_KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Bool": "true or false",
    "Boolean": "true or false",
    "String": "a text",
}
_UNION_KINDS = {"int": "a number", "float": "a number", "str": "a text"}


@dataclass
class Known:
    """What explaining one job of a sweep has found out, and need not be found out again for the next.

    Attributes:
        repo: the options of the groups, read once.
        checked: what the rules say of a configuration, by the overrides that it was composed of.
    """

    repo: IConfigRepository
    checked: dict[tuple[str, ...], list[Violation]] = field(default_factory=dict)

    def check(self, config: DictConfig, overrides: list[str]) -> list[Violation]:
        """Check a configuration against the rules, once for the same overrides."""
        key = tuple(overrides)
        if key not in self.checked:
            self.checked[key] = check(config)
        return self.checked[key]


def find_mistakes(
    loader: ConfigLoaderImpl,
    config_name: str | None,
    compose: Callable[[list[str]], DictConfig],
    overrides: list[str],
    error: Exception,
    *,
    whole: bool,
    known: Known | None = None,
) -> list[Violation]:
    """Explain why composing `overrides` failed with `error`.

    The choices of groups are checked first; then every other override is applied alone to what those choices compose
    to; what is left is checked against the rules, if `whole`.

    Args:
        loader: Hydra's.
        config_name: of the primary configuration.
        compose: composes overrides, unchecked; returns a configuration that may be changed.
        overrides: those that failed together.
        error: what composing them raised.
        whole: whether they are all of a run's, rather than those of a sweep.
        known: from other jobs of the same sweep.
    """
    parsed, violations = _parse(overrides)
    if known is None:
        options = CachingConfigRepository(loader.repository)
        loader._process_config_searchpath(config_name, parsed, options)
        known = Known(options)
    repo = known.repo
    good = [o for o in parsed if o.is_hydra_override()]
    choices = [o for o in parsed if o not in good and _is_choice(repo, o)]
    values = [o for o in parsed if o not in good and o not in choices]
    for choice in choices:
        found = list(_check_choice(repo, choice))
        violations += found
        if not found:
            good.append(choice)
    try:
        config = compose(_lines(good))
    except HYDRA_ERRORS as base_error:
        return violations or [_unattributed(base_error)]
    for value in values:
        found = list(_apply(repo, config, value, sweeping=not whole))
        violations += found
        if not found:
            good.append(value)
    if not violations:
        return [_unattributed(error)]
    return violations + (known.check(config, _lines(good)) if whole else [])


def master_over_options(
    loader: ConfigLoaderImpl, config_name: str | None, compose: Callable[[list[str]], DictConfig], overrides: list[str]
) -> DictConfig | None:
    """A sweep's own configuration where jobs choose among options, and a fixed setting may be known to these only.

    Hydra composes it with the default options (hydra-core issue 2888). Settings that these do not know are left out
    here; each job is composed with all of them, and refused if its own options do not know one.

    Returns:
        None where no option is swept, so that the mistake is every job's.
    """
    parsed, violations = _parse(overrides)
    repo = CachingConfigRepository(loader.repository)
    loader._process_config_searchpath(config_name, parsed, repo)
    good = [o for o in parsed if o.is_hydra_override() or _is_choice(repo, o)]
    try:
        config = compose(_lines(good))
    except HYDRA_ERRORS:
        return None
    swept = [o.key_or_group for o in good if o.is_sweep_override()]
    swept += OmegaConf.select(config, "hydra.sweeper.params") or {}
    if violations or not any(map(repo.group_exists, swept)):
        return None
    master = compose(_lines(o for o in parsed if o in good or not list(_apply(repo, config, o, sweeping=True))))
    with open_dict(master):
        master.hydra.overrides.task = _lines(o for o in parsed if not o.is_hydra_override())
    return master


def _lines(overrides: Iterable[Override]) -> list[str]:
    return [o.input_line for o in overrides if o.input_line is not None]


def _parse(overrides: list[str]) -> tuple[list[Override], list[Violation]]:
    parser, parsed, violations = OverridesParser.create(), list[Override](), list[Violation]()
    for line in overrides:
        try:
            parsed += parser.parse_overrides([line])
        except HydraException:
            violations.append(
                Violation(line, "is not of the form key=value; quote values that hold spaces, commas or =")
            )
    return parsed, violations


def _is_choice(repo: IConfigRepository, override: Override) -> bool:
    """Whether an override chooses an option of a group, rather than setting a value."""
    return repo.group_exists(override.key_or_group) and not isinstance(override._value, dict)


def _options(repo: IConfigRepository, group: str) -> list[str]:
    return list(repo.get_group_options(group, ObjectType.CONFIG))


def _groups(repo: IConfigRepository) -> list[str]:
    return [g for g in repo.get_group_options("", ObjectType.GROUP) if g not in ("hydra", "schema")]


def _check_choice(repo: IConfigRepository, choice: Override) -> Iterator[Violation]:
    group, options = choice.key_or_group, _options(repo, choice.key_or_group)
    if choice.is_sweep_override():
        value: Any = [v if isinstance(v, str) else str(v) for v in choice.sweep_iterator()]
    else:
        value = choice.value()
    for name in value if isinstance(value, list) else [value]:
        if name is None and group in GROUPS:
            yield Violation(group, f"cannot be null; options: {', '.join(options)}")
        elif name is not None and str(name) not in options:
            listed = f"options: {', '.join(options)}" if options else "it has none; see --config-dir for your own"
            yield Violation(group, f"has no option {str(name)!r}{nearest(str(name), options)} ({listed})")


def _apply(repo: IConfigRepository, config: DictConfig, override: Override, *, sweeping: bool) -> Iterator[Violation]:
    """Apply one override to the configuration, or say what is wrong with it."""
    if override.is_sweep_override():
        if not sweeping:
            text = override.get_value_string()
            yield Violation(override.key_or_group, f"is {text}: to sweep over it add -m; for a list write [{text}]")
        return
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        yield _explain(repo, config, override, str(cause))


def _explain(repo: IConfigRepository, config: DictConfig, override: Override, message: str) -> Violation:
    key = override.key_or_group
    if override.is_delete():
        return Violation(key, "cannot be removed; give it another value, or null where it may have none")
    node = OmegaConf.select(config, key)
    if isinstance(override.value(), dict) and isinstance(node, DictConfig):
        if OmegaConf.get_type(node) is not dict:
            return _explain_mapping(key, override, node, message)
        return Violation(key, f"has no such keys yet; to add them write +{override.input_line}")
    if "not in" in message or "does not exist" in message:
        return Violation(key, _unknown_key(repo, config, key))
    return explain_value(override, message)


def _explain_mapping(key: str, override: Override, node: DictConfig, message: str) -> Violation:
    """What is wrong with a mapping given to a schema."""
    given, names = cast(dict[Any, Any], override.value()), [str(name) for name in node]
    unknown = [str(name) for name in given if str(name) not in names]
    if unknown:
        return Violation(f"{key}.{unknown[0]}", f"is no key of {key}{nearest(unknown[0], names)}")
    return explain_value(override, message)


def explain_value(override: Override, message: str) -> Violation:
    """What is wrong with a value, from OmegaConf's message about it."""
    key, value = override.key_or_group, override.get_value_string()
    if options := re.search(r"expected one of \[(.*)\]", message):
        names = [name.strip() for name in options[1].split(",")]
        return Violation(key, f"is {value} but must be one of {', '.join(names)}{nearest(value, names)}")
    if kind := re.search(r"could not be converted to (\w+)|not a valid (\w+)", message):
        name = (kind[1] or kind[2]).capitalize()
        return Violation(key, f"is {value} but must be {_KINDS.get(name, name)}")
    if union := re.search(r"type hint '.*Union\[([^\]]*)\]", message):
        kinds = dict.fromkeys(_UNION_KINDS.get(name, name) for name in union[1].split(", "))
        return Violation(key, f"is {value} but must be {' or '.join(kinds)}")
    return Violation(key, f"cannot be {value}: {_first_line(message)}")


def _unknown_key(repo: IConfigRepository, config: DictConfig, key: str) -> str:
    group, _, leaf = key.rpartition(".")
    if not group:
        names = [*_groups(repo), *_leaves(config)]
        near = difflib.get_close_matches(key, _groups(repo), n=1, cutoff=0.6)
        home = [name for name in names if name.rpartition(".")[2] == key]
        hint = f"; did you mean {near[0]}?" if near else f"; did you mean {home[0]}?" if home else nearest(key, names)
        return f"is neither a group nor a key{hint}"
    elsewhere = list(_options_with(repo, group, leaf))
    if elsewhere:
        return f"is not a setting of the chosen {group}; it belongs to {' and '.join(elsewhere)}"
    return f"is no key of {group}{nearest(key, _leaves(config))}"


def _options_with(repo: IConfigRepository, group: str, leaf: str) -> Iterator[str]:
    """The options of a group whose schema has a field `leaf`, as a user would choose them."""
    if group not in GROUPS:
        return
    having = {name for name, schema in group_schemas(group).items() if leaf in schema.__dataclass_fields__}
    for option in _options(repo, group):
        loaded = repo.load_config(f"{group}/{option}")
        defaults = (loaded.defaults_list if loaded else None) or []
        used = {str(d.get_name()).rpartition("/")[2] for d in defaults if d.get_name()}
        if used & having:
            yield f"{group}={option}"


def _leaves(config: DictConfig, path: str = "") -> list[str]:
    """Dotted paths of all values of foundry's own groups."""
    paths = []
    for key in config:
        if path == "" and key == "hydra":
            continue
        node, full = config._get_node(key), f"{path}.{key!s}" if path else str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            paths += _leaves(node, full)
        else:
            paths.append(full)
    return paths


def _unattributed(error: Exception) -> Violation:
    """An error that no single override explains, such as a wrong key in a YAML file, in one line."""
    cause = error.__cause__ or error
    text = f"{_first_line(str(error))} {_first_line(str(cause)) if cause is not error else ''}".strip()
    where = re.search(r"In '([^']*)'", str(error))
    key = re.search(r"full_key: (\S+)", str(cause)) or re.search(r"full_key: (\S+)", str(error))
    return Violation(where[1] if where else key[1] if key else "configuration", text)


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines[0] if lines else "unknown error")
