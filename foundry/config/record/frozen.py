"""Saving the resolved configuration in the run directory, hashing it, and reading it back with its types."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.composition.store import group_schemas, writable
from foundry.config.record.recorded import (
    built_in_targets,
    foreign_parts,
    missing_packages,
    missing_tasks,
    read_settings,
    variables,
)
from foundry.config.record.secrets import check_secrets
from foundry.config.record.strict_yaml import read_yaml
from foundry.config.schemas.evaluation import recorded_interval
from foundry.config.schemas.root import Config, to_config
from foundry.config.target_names import respelled
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.core.part_names import original_path
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import CONFIG
from foundry.run_dir.redact import recorded, remember
from foundry.run_dir.strict_json import encode

_LONGEST = 140  # characters in a line


def plain(node: Any) -> Any:
    """Convert dataclasses, enums and containers to values for YAML and JSON.

    A secret becomes a reference to the environment variable that it came from.
    """
    if is_dataclass(node):
        return {item.name: plain(getattr(node, item.name)) for item in fields(node)}
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(value) for value in node]
    if isinstance(node, str):
        return recorded(node)
    return node.name if isinstance(node, Enum) else node


def strict(config: Config) -> dict[str, Any]:
    """Return the configuration as strict JSON, for a manifest.

    An infinite number, such as `grad_clip_norm=inf`, becomes a string.
    """
    content: dict[str, Any] = json.loads(encode(plain(config)))
    return content


def hash_config(config: Config) -> str:
    """Return the SHA-256 of the configuration as hex digits, independent of the number of ranks.

    For the same hash as in earlier versions, each `_target_` has the path of its first version, and settings with
    `since` are left out at their default. `accum_freq`, which is computed from the number of ranks, is left out.
    """
    content = respelled(_hashed_content(config), original_path)
    del content["hparams"]["accum_freq"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hashed_content(node: Any) -> Any:
    """Convert to plain containers, leaving out settings that have `since` and are at their default."""
    if not is_dataclass(node):
        return plain(node)
    return {
        item.name: _hashed_content(value)
        for item in fields(node)
        if not _is_omitted_from_hash(item, value := getattr(node, item.name))
    }


def _is_omitted_from_hash(item: "Field[Any]", value: Any) -> bool:
    default = item.default if item.default_factory is NO_DEFAULT else item.default_factory()
    return item.metadata.get("since") is not None and bool(plain(value) == plain(default))


def save_config(config: Config, run_dir: Path) -> Path:
    """Write the resolved configuration to the run directory and return the path of the file."""
    return save_yaml(OmegaConf.create(plain(config)), run_dir / CONFIG)


def save_yaml(node: Any, path: Path) -> Path:
    """Write an OmegaConf node to a file, interpolations unresolved, and return the path of the file."""
    write_atomically(path, OmegaConf.to_yaml(node))
    return path


def read_recorded(run_dir: Path) -> dict[str, Any] | None:
    """Return the configuration in a run directory as plain containers, without building anything.

    foundry's own parts have their public names.

    Returns:
        The configuration; None if the file is missing or is not a mapping in YAML.
    """
    try:
        saved = read_yaml(run_dir / CONFIG)
    except (OSError, ValueError):
        return None
    return {str(key): respelled(value) for key, value in saved.items()} if isinstance(saved, dict) else None


def load_config(run_dir: Path, *, trust: bool = False) -> Config:
    """Read a run's configuration back with its types.

    Imports no part; resolves environment variables only with `trust`.

    A setting that the file lacks, because an earlier version wrote the file, takes its default.

    Args:
        run_dir: the run directory, which may come from an untrusted source.
        trust: allow parts that are not built in, which run code when they are built, and read the environment variables
            that the file names for its secrets.

    Raises:
        ConfigError: if `run_dir` contains no run, a run of a task that is not installed, or a configuration that cannot
            be read or trusted.
    """
    path = run_dir / CONFIG
    content = read_settings(path, "run")
    _check_content(path, content, trust=trust)
    _replace_former_values(content)
    nodes = {item.name: typed_group(path, item.name, content.get(item.name, {})) for item in fields(Config)}
    try:
        merged = OmegaConf.create(nodes)
        list(
            check_secrets(merged)
        )  # remembers the secrets; errors are ignored, since an older version may have recorded secrets as text
        for key, text in variables(content):
            if trust:
                remember(str(OmegaConf.select(merged, key)), text)  # later output shows the variable's name only
            else:
                OmegaConf.update(merged, key, text.replace("${", r"\${"))  # escape the reference, so that it stays text
        return to_config(merged)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise _run_error(
            path, f"has an invalid {getattr(error, 'full_key', None) or 'value'}: {_one_line(error)}"
        ) from None


def _check_content(path: Path, content: dict[str, Any], *, trust: bool) -> None:
    """Check that a recorded configuration has known groups, and parts that are installed and trusted.

    Raises:
        ConfigError: if a group is unknown or missing, or a part is not installed or not trusted.
    """
    groups = {item.name: item for item in fields(Config)}
    if unknown := [as_text(name) for name in content if name not in groups]:
        raise _run_error(path, f"has {', '.join(unknown)}, which this version of foundry does not know")
    if missing := [name for name, item in groups.items() if name not in content and item.default == MISSING]:
        raise _run_error(path, f"lacks {' and '.join(missing)}")
    if missing := list(missing_tasks(content)):
        raise ConfigError(Violation("run", f"{path} {line}") for line in missing)
    if not trust and (foreign_settings := list(foreign_parts(content))):
        raise ConfigError([*_trust_errors(path, foreign_settings), *_package_errors(path, content)])
    if missing_parts := list(_package_errors(path, content)):
        raise ConfigError(missing_parts)


def _replace_former_values(content: dict[str, Any]) -> None:
    """Replace values in a recorded configuration that only earlier versions accept."""
    if isinstance(evaluation := content.get("evaluation"), dict) and "interval" in evaluation:
        evaluation["interval"] = recorded_interval(evaluation["interval"])
    if isinstance(hparams := content.get("hparams"), dict) and hparams.get("torchcompile") == "auto":
        hparams["torchcompile"] = False  # an earlier version recorded auto, and each run decided


def typed_group(path: Path, group: str, node: Any) -> Any:
    """Merge a recorded group into the schema that wrote the group, with public names of parts.

    Custom parts are returned as mappings, without a schema.

    Args:
        path: file that the group was read from.
        group: name of the group.
        node: content of the group.

    Raises:
        ConfigError: if no schema matches, or a value has the wrong type.
    """
    if not isinstance(node, dict):
        raise _run_error(path, f"has {group}={as_text(node)}, which must be a mapping")
    node = respelled(node)
    schemas = [schema for schema in group_schemas(group).values() if _matches_schema(group, schema, node)]
    if built_in_targets(group) and node.get("_target_") not in (None, *built_in_targets(group)):
        return node  # a custom part, which the caller has trusted
    if not schemas:
        raise _run_error(
            path, f"has a {group} that this version of foundry does not know: {_unknown_settings(group, node)}"
        )
    schema = min(schemas, key=lambda s: _distance(s, node))
    try:
        return OmegaConf.merge(writable(schema), node)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = ".".join(filter(None, (group, getattr(error, "full_key", None))))
        raise _run_error(path, f"has an invalid {key}: {_one_line(error)}") from None


def _matches_schema(group: str, schema: type[Any], node: dict[str, Any]) -> bool:
    """Return True if a schema belongs to the group, and has all fields of a node and the same `_target_`."""
    declared_type = {item.name: item.type for item in fields(Config)}[group]
    defaults = {item.name: item.default for item in fields(schema)}
    is_declared = declared_type is Any or issubclass(schema, cast(type, declared_type))
    return is_declared and set(node) <= set(defaults) and node.get("_target_") == defaults.get("_target_")


def _distance(schema: type[Any], node: dict[str, Any]) -> tuple[bool, bool, int]:
    """Return a sort key: the distance of a node from a matching schema.

    The value of `strategy` distinguishes schemas with equal fields.
    """
    defaults = {item.name: plain(item.default) for item in fields(schema)}
    return set(node) != set(defaults), node.get("strategy") != defaults.get("strategy"), len(defaults)


def _unknown_settings(group: str, node: dict[str, Any]) -> str:
    names = {item.name for schema in group_schemas(group).values() for item in fields(schema)}
    return ", ".join(f"{group}.{as_text(name)}" for name in node if name not in names) or f"{group}={as_text(node)}"


def _trust_errors(path: Path, foreign_settings: list[str]) -> Iterator[Violation]:
    """Yield errors that name all untrusted parts, in lines of limited length."""
    lines = [foreign_settings[0]]
    for part in foreign_settings[1:]:
        if len(lines[-1]) + len(part) > _LONGEST:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    for line in lines:
        yield Violation("run", f"{path} uses custom code: {line}; add trust=true if you trust its author")


def _package_errors(path: Path, content: dict[str, Any]) -> Iterator[Violation]:
    """Yield an error for each package of parts that is not installed, such as a package of an external task."""
    for package, setting in missing_packages(content).items():
        message = f"{path} uses parts of {package}, which is not installed here: {setting}"
        yield Violation("run", f"{message}; install it or add it to PYTHONPATH")


def _run_error(path: Path, message: str) -> ConfigError:
    return ConfigError(Violation("run", f"{path} {message}"))


def _one_line(error: Exception) -> str:
    return as_text(next(iter(str(error).splitlines()), type(error).__name__))
