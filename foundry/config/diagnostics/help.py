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
from foundry.config.schemas.launcher import Local, Slurm
from foundry.config.schemas.root import Config
from foundry.config.schemas.sweeper import Search, Sweep, Sweeper

_WITHOUT_SCHEMA = {
    "experiment": "a file of yours that fixes a set of choices",
    "hparams_search": "a ready sweep",
    "debug": "a run of seconds through every part",
}
_HIDDEN = ("hydra", "local", "schema")
_INDENT, _WIDTH = 20, 116
_SWEEPS = """foundry -m key=value,value ...
python -m foundry -m key=value,value ...

a sweep: a job for every combination of what is swept; all jobs are checked before the first starts.

What is swept: any key or group with several values, key=1e-3,2e-3, key=range(1,5) or, for a search, key=interval(1,2);
ready sweeps are hparams_search={ready}. Jobs go to hydra.sweep.dir (default multirun/TIME).
`foundry report dir=DIR` shows a sweep as a table and a picture.
"""


def write_sweep_page(loader: ConfigLoader) -> str:
    """Return the help page of `-m`: the options of sweepers and launchers."""
    repository, _ = open_repository(loader, None, [])
    ready = ",".join(repository.get_group_options("hparams_search", ObjectType.CONFIG))
    lines = [_SWEEPS.format(ready=ready)]
    for choice, schemas in {
        "hydra/sweeper=foundry (the default): a grid": (Sweep,),
        "hydra/sweeper=optuna: a search; needs the package optuna": (Search,),
        "hydra/launcher=local (the default is sequential: one job after the other)": (Local,),
        "hydra/launcher=slurm": (Slurm,),
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
        loader: config loader that knows these folders.
        overrides: overrides that may add folders, such as `hydra.searchpath`.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides)) if overrides else []
    repository, _ = open_repository(loader, None, parsed)  # the loader's own methods open a repository for each group
    known = [item.name for item in fields(Config)]
    found = [group for group in repository.get_group_options("", ObjectType.GROUP) if group not in _HIDDEN]
    order = sorted(found, key=lambda group: (known.index(group) if group in known else len(known), group))
    lines = [_line(group, repository.get_group_options(group, ObjectType.CONFIG)) for group in order]
    return "\n".join([*lines, *_own_options(repository)])


def _own_options(repository: IConfigRepository) -> Iterator[str]:
    """Yield the options in the user's folders, one paragraph per folder."""
    for source in repository.get_sources():
        if source.scheme() != "file" or Path(source.path) == Path(config_dir()):
            continue
        choices = [f"{group}={name}" for group in _groups_of(source) for name in source.list(group, ObjectType.CONFIG)]
        text = f"Yours, in {os.path.relpath(source.path)}: {', '.join(choices) or 'no options'}"
        yield "\n" + textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _groups_of(source: ConfigSource, below: str = "") -> Iterator[str]:
    """Yield the groups of a folder, including nested groups."""
    for name in source.list(below, ObjectType.GROUP):
        group = f"{below}/{name}" if below else name
        yield group
        yield from _groups_of(source, group)


def _line(group: str, options: list[str]) -> str:
    meaning = _WITHOUT_SCHEMA.get(group, "")
    if group in {item.name for item in fields(Config)}:
        meaning = str(import_module(f"foundry.config.schemas.{group}").__doc__).partition(": ")[2].strip().rstrip(".")
    text = ", ".join(options) + (f": {meaning}" if meaning else "")
    head = f"  {group}= ".ljust(_INDENT)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * _INDENT)
