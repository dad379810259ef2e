"""What an unknown name may mean: a misspelt setting, one of another group, or what another system calls it."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig

from foundry.config.errors import nearest
from foundry.config.schemas.root import Config
from foundry.config.store import group_schemas

_ELSEWHERE = {
    "hydra.run.dir": ("output_dir", "save_dir", "run_dir", "out_dir", "log_dir", "logging_dir", "default_root_dir"),
    "optimizer": ("optim", "optimizer_name", "optimizer_type"),
    "scheduler": ("lr_scheduler", "lr_scheduler_type", "lr_schedule", "lr_decay_style"),
    "peft": ("finetuning_type", "peft_type", "peft_config", "use_peft", "lora", "use_lora"),
    "distributed": ("parallel", "parallelism", "fsdp", "ddp", "deepspeed"),
}
"""Other systems' names of what is no setting of a schema."""


def did_you_mean(key: str, known: Collection[str], groups: Collection[str] = ()) -> str:
    """`; did you mean x?` for a dotted key that there is not, or nothing.

    A name that is right elsewhere, or another system's for the same, says more than one that is spelt alike.

    Args:
        key: as it was given.
        known: dotted paths of the settings that there are.
        groups: what can be chosen besides them.
    """
    group, _, leaf = key.rpartition(".")
    if leaf.startswith("_"):  # such as _target_, which every part has
        return ""
    if leaf in groups:
        return f"; did you mean {leaf}?"
    if home := [path for path in known if path.rpartition(".")[2] == leaf]:
        return f"; did you mean {min(home, key=lambda path: path.count('.'))}?"
    if paths := [path for path in _elsewhere().get(leaf.lower().replace("-", "_"), []) if path != key]:
        path = next((path for path in paths if path.startswith(f"{group}.")), paths[0])
        return f"; did you mean {path}?{_brief(meanings().get(path, ''))}"
    near = difflib.get_close_matches(key, groups, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else nearest(key, known)


def leaves(config: DictConfig, path: str = "") -> list[str]:
    """Dotted paths of all values of foundry's own groups."""
    paths = []
    for key in config:
        if path == "" and key == "hydra":
            continue
        node, full = config._get_node(key), f"{path}.{key!s}" if path else str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            paths += leaves(node, full)
        else:
            paths.append(full)
    return paths


@cache
def _elsewhere() -> dict[str, list[str]]:
    """The settings that other systems call by a name."""
    named = {name: [path] for path, names in _ELSEWHERE.items() for name in names}
    for path, metadata in settings():
        elsewhere = f"{metadata.get('source', '')},{metadata.get('aliases', '')}"
        for name in (path.rpartition(".")[2], *elsewhere.split(",")):
            paths = named.setdefault(name.strip(), [])
            if path not in paths:
                paths.append(path)
    return named


@cache
def meanings() -> dict[str, str]:
    """Every setting of every schema by its dotted path, and what it means."""
    return {path: metadata.get("doc", "") for path, metadata in settings()}


def settings() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every setting's dotted path, with what its schema says of it; several schemas may have the same one."""
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
