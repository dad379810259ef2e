"""Hints for unknown keys: a name in another framework, a setting of another group, or a misspelt setting."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig

from foundry.config.composition.store import GROUPS, group_schemas
from foundry.config.diagnostics.other_frameworks import Options, hint, own_options
from foundry.config.schemas.root import Config

_LIKE_A_LEAF, _LIKE_A_GROUP = 0.6, 0.75
"""Minimum difflib similarity: of the last parts of keys in one group, and of groups or keys of any group."""


def did_you_mean(
    key: str,
    existing: Collection[str],
    groups: Collection[str] = (),
    *,
    value: str | None = None,
    options: Options = own_options,
) -> str:
    """Return a hint for an unknown dotted key, `; write x=1` or `; did you mean x?`, or an empty string.

    Names in other frameworks come first, then settings of the same name in another group, then similar spellings.

    Args:
        key: key as typed.
        existing: dotted paths of the existing settings.
        groups: groups that may be chosen.
        value: value as typed; None if it is unknown.
        options: lists the options of a group.
    """
    group, _, leaf = key.rpartition(".")
    if leaf.startswith("_"):  # e.g. _target_, which every part has
        return ""
    if framework_hint := hint(key, value, existing, options):
        return framework_hint
    if leaf in groups:
        return f"; did you mean {leaf}?"
    settings = [path for path in existing if not path.rpartition(".")[2].startswith("_")]
    if same_name := [path for path in settings if path.rpartition(".")[2] == leaf]:
        return f"; did you mean {min(same_name, key=lambda path: path.count('.'))}?"
    if paths := [path for path in _by_name().get(leaf.lower().replace("-", "_"), []) if path != key]:
        path = next((path for path in paths if path.startswith(f"{group}.")), paths[0])
        return f"; did you mean {path}?{_brief(meanings().get(path, ''))}"
    return _similar_spelling(key, settings, groups)


def override_for(word: str) -> str:
    """Return a hint such as `; did you mean hparams=x?` for an argument without `=`, or an empty string."""
    if not re.fullmatch(r"[A-Za-z][\w./-]*", word):
        return ""
    groups = ("hparams", *GROUPS, "experiment", "debug", "hparams_search")
    choices = {option: group for group in reversed(groups) for option in own_options(group)}
    if word in meanings() or word in GROUPS:
        return f"; write {word}=..."
    if word not in choices and (hint := did_you_mean(word, meanings(), GROUPS)):
        return hint
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=_LIKE_A_GROUP)
    return f"; did you mean {choices[matches[0]]}={matches[0]}?" if matches else ""


def _similar_spelling(key: str, settings: Collection[str], groups: Collection[str]) -> str:
    """Return a hint with the most similar group or setting; outside of the key's group, the similarity must be high."""
    group, _, leaf = key.rpartition(".")
    if matches := difflib.get_close_matches(key, groups, n=1, cutoff=_LIKE_A_GROUP):
        return f"; did you mean {matches[0]}?"
    group_settings = [path for path in settings if group and path.rpartition(".")[0] == group]
    for paths, cutoff in ((group_settings, _LIKE_A_LEAF), (settings, _LIKE_A_GROUP)):
        names = {path.rpartition(".")[2]: path for path in sorted(paths, reverse=True)}
        if matches := difflib.get_close_matches(leaf.lower(), names, n=1, cutoff=cutoff):
            return f"; did you mean {names[matches[0]]}?"
    return ""


def leaves(config: DictConfig, path: str = "") -> list[str]:
    """Return the dotted paths of all values outside of the `hydra` node."""
    paths = []
    for key in config:
        if path == "" and key == "hydra":
            continue
        node, full_path = config._get_node(key), f"{path}.{key!s}" if path else str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            paths += leaves(node, full_path)
        else:
            paths.append(full_path)
    return paths


@cache
def _by_name() -> dict[str, list[str]]:
    """Return the settings of all schemas, keyed by the last part of their paths."""
    paths_by_name = dict[str, list[str]]()
    for path in meanings():
        paths_by_name.setdefault(path.rpartition(".")[2], []).append(path)
    return paths_by_name


@cache
def meanings() -> dict[str, str]:
    """Return the description of every setting of every schema, keyed by its dotted path."""
    return {path: metadata.get("doc", "") for path, metadata in settings()}


def settings() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dotted path and the metadata of every setting; a path repeats if several schemas have it."""
    for group, base in get_type_hints(Config).items():
        for schema in group_schemas(group).values():
            if hasattr(schema, "_target_") if base is Any else issubclass(schema, base):
                yield from _fields(schema, group)


def _fields(schema: type[Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            yield from _fields(hints[item.name], f"{path}.{item.name}")
        elif not item.name.startswith("_"):
            yield f"{path}.{item.name}", item.metadata


def _brief(doc: str) -> str:
    return f" ({doc.partition(';')[0]})" if doc else ""
