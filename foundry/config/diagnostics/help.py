"""Help pages, and the list of config groups in them."""

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from string import Template

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from foundry.config.command import option_lines
from foundry.config.composition.compose import config_dir
from foundry.config.composition.hydra_internals import IConfigRepository, open_repository
from foundry.config.schemas.kubernetes import Kubernetes
from foundry.config.schemas.launcher import Local, Ray, Slurm
from foundry.config.schemas.root import Config
from foundry.config.schemas.sweeper import Search, Sweep, Sweeper

_WITHOUT_SCHEMA = {
    "experiment": "presets, each a set of overrides",
    "hparams_search": "predefined sweeps",
    "debug": "a run of a few seconds (fast), or a profiler (profile)",
}
_HIDDEN = ("hydra", "local", "schema")
_INDENT, _WIDTH = 20, 116
_SWEEPS = """foundry -m key=value,value ...
python -m foundry -m key=value,value ...

Run a sweep: a job for every combination of the values. All jobs are checked before the first starts.

Any key or group can have several values: key=1e-3,2e-3, key=range(1,5) or, for a search, key=interval(1,2).
Predefined sweeps are hparams_search={ready}. Jobs go to hydra.sweep.dir (default multirun/TIME).
`foundry report dir=DIR` shows a sweep as a table and a plot.
"""


def write_sweep_page(loader: ConfigLoader) -> str:
    """Return the help page of `-m`: the options of sweepers and launchers."""
    repository, _ = open_repository(loader, None, [])
    presets = ",".join(repository.get_group_options("hparams_search", ObjectType.CONFIG))
    lines = [_SWEEPS.format(ready=presets)]
    for choice, schemas in {
        "hydra/sweeper=foundry (the default): a grid search": (Sweep,),
        "hydra/sweeper=optuna: a search with Optuna; requires the package optuna": (Search,),
        "hydra/launcher=local (the default is sequential, which runs one job after the other)": (Local,),
        "hydra/launcher=slurm": (Slurm,),
        "hydra/launcher=ray: requires the package ray": (Ray,),
        "hydra/launcher=kubernetes: requires the package kubernetes": (Kubernetes,),
    }.items():
        prefix = "hydra.sweeper." if issubclass(schemas[0], Sweeper) else "hydra.launcher."
        lines += [choice, *(line for schema in schemas for line in option_lines(schema, prefix)), ""]
    return "\n".join(lines)


def write_page(loader: ConfigLoader) -> str:
    """Return the page of `conf/hydra/help/foundry.yaml` without composing a configuration."""
    repository, _ = open_repository(loader, None, [])
    loaded = repository.load_config("hydra/help/foundry")
    assert loaded is not None
    page = OmegaConf.create({"hydra": {"help": loaded.config}})
    return Template(page.hydra.help.template).substitute(APP_CONFIG_GROUPS=list_groups(loader))


def list_groups(loader: ConfigLoader, overrides: Sequence[str] = ()) -> str:
    """Return the description and the options of each group, including options in the user's folders.

    Args:
        loader: config loader that knows the folders of the user.
        overrides: overrides that may add folders, such as `hydra.searchpath`.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides)) if overrides else []
    repository, _ = open_repository(loader, None, parsed)  # the loader's own methods open a repository for each group
    schema_groups = [item.name for item in fields(Config)]
    groups = [group for group in repository.get_group_options("", ObjectType.GROUP) if group not in _HIDDEN]
    order = sorted(
        groups, key=lambda group: (schema_groups.index(group) if group in schema_groups else len(schema_groups), group)
    )
    lines = [_line(group, repository.get_group_options(group, ObjectType.CONFIG)) for group in order]
    return "\n".join([*lines, *_own_options(repository)])


def _own_options(repository: IConfigRepository) -> Iterator[str]:
    """Yield the options in the user's folders, one paragraph per folder."""
    for source in repository.get_sources():
        if source.scheme() != "file" or Path(source.path) == Path(config_dir()):
            continue
        choices = [f"{group}={name}" for group in _groups_of(source) for name in source.list(group, ObjectType.CONFIG)]
        text = f"Your options, in {os.path.relpath(source.path)}: {', '.join(choices) or 'no options'}"
        yield "\n" + textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _groups_of(source: ConfigSource, parent: str = "") -> Iterator[str]:
    """Yield the groups of a folder, including nested groups."""
    for name in source.list(parent, ObjectType.GROUP):
        group = f"{parent}/{name}" if parent else name
        yield group
        yield from _groups_of(source, group)


def _line(group: str, options: list[str]) -> str:
    meaning = _WITHOUT_SCHEMA.get(group, "")
    if group in {item.name for item in fields(Config)}:
        meaning = str(import_module(f"foundry.config.schemas.{group}").__doc__).partition(": ")[2].strip().rstrip(".")
    text = ", ".join(options) + (f": {meaning}" if meaning else "")
    head = f"  {group}= ".ljust(_INDENT)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * _INDENT)
