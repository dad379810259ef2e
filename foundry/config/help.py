"""The page of `--help`, and the groups of the configuration as it lists them."""

import textwrap
from dataclasses import fields
from importlib import import_module
from string import Template

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from foundry.config.hydra_internals import open_repository
from foundry.config.schemas.root import Config

_WITHOUT_SCHEMA = {
    "experiment": "a file of yours that fixes a set of choices",
    "hparams_search": "a ready sweep",
    "debug": "a run of seconds through every part",
}
_HIDDEN = ("hydra", "local", "schema")
_INDENT, _WIDTH = 20, 116


def write_page(loader: ConfigLoader) -> str:
    """The page of `conf/hydra/help/foundry.yaml`, for which nothing has to be composed."""
    repository, _ = open_repository(loader, None, [])
    loaded = repository.load_config("hydra/help/foundry")
    assert loaded is not None
    page = OmegaConf.create({"hydra": {"help": loaded.config}})
    return Template(page.hydra.help.template).substitute(APP_CONFIG_GROUPS=list_groups(loader))


def list_groups(loader: ConfigLoader) -> str:
    """A line or more for each group: what it decides, and its options, those of the user's own folders included."""
    repository, _ = open_repository(loader, None, [])  # the loader's own methods open one for each group
    known = [item.name for item in fields(Config)]
    found = [group for group in repository.get_group_options("", ObjectType.GROUP) if group not in _HIDDEN]
    order = sorted(found, key=lambda group: (known.index(group) if group in known else len(known), group))
    return "\n".join(_line(group, repository.get_group_options(group, ObjectType.CONFIG)) for group in order)


def _line(group: str, options: list[str]) -> str:
    meaning = _WITHOUT_SCHEMA.get(group, "")
    if group in {item.name for item in fields(Config)}:
        meaning = str(import_module(f"foundry.config.schemas.{group}").__doc__).partition(": ")[2].strip().rstrip(".")
    text = ", ".join(options) + (f": {meaning}" if meaning else "")
    head = f"  {group}= ".ljust(_INDENT)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * _INDENT)
