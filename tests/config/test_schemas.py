"""Every schema matches the parameters of the part that it configures, and documents its fields."""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from hydra.utils import get_method, get_object

from foundry.config.build import FOR_THE_BUILDER
from foundry.config.checks.targets import RUN_ARGUMENTS, runtime_settings
from foundry.config.composition.compose import config_dir
from foundry.config.composition.store import GROUPS, group_schemas
from foundry.config.schemas.root import Config

SCHEMAS = {(group, name): schema for group in GROUPS for name, schema in group_schemas(group).items()}


def target_of(schema):
    """Return the target of a schema, or None for a group without parts, a base class or `model=base`."""
    default = next((item.default for item in dataclasses.fields(schema) if item.name == "_target_"), None)
    return None if default in (None, "???", dataclasses.MISSING) else default


PARTS = {key: target_of(schema) for key, schema in SCHEMAS.items() if target_of(schema)}
GROUP_OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in Path(config_dir()).iterdir()
    if folder.is_dir() and folder.name not in ("hydra", "local")
}
OPTION_FILES = sorted(path for path in Path(config_dir()).rglob("*.yaml"))


def test_every_group_of_parts_has_schemas():
    groups = {"optimizer", "scheduler", "model", "data", "objective", "environment", "simulator"}
    assert {group for group, _ in PARTS} == groups
    assert len(PARTS) > 12


def resolve_parameters(part):
    """Return the parameters by name; parameters of the class replace the `**keywords` of its class method."""
    parameters = dict(inspect.signature(part).parameters)
    for name in [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]:
        del parameters[name]
        own = inspect.signature(part.__self__).parameters
        made = {"warmup", "horizon", "decay", "weight_decay_curve"}
        parameters |= {name: p for name, p in own.items() if name not in made}
    return parameters


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_discovers_a_schema_in_a_new_file(group, tmp_path, monkeypatch):
    text = "@dataclass(frozen=True, kw_only=True)\nclass InAFile:\n    size: int = 1\n"
    (tmp_path / "in_a_file.py").write_text(f"from dataclasses import dataclass\n\n\n{text}")
    package = importlib.import_module(f"foundry.config.schemas.{group}")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.in_a_file", raising=False)
    assert group_schemas(group)["InAFile"]().size == 1
    del sys.modules[f"{package.__name__}.in_a_file"]


@pytest.mark.parametrize("key", PARTS, ids="/".join)
def test_part_accepts_the_fields_of_its_schema(key):
    parameters = resolve_parameters(
        get_method(PARTS[key]) if PARTS[key].endswith("_durations") else get_object(PARTS[key])
    )
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    given = {item.name for item in dataclasses.fields(SCHEMAS[key])} - {"_target_", *FOR_THE_BUILDER} | set(
        RUN_ARGUMENTS[key[0]]
    )
    given -= set(runtime_settings(key[0])) if key[0] in ("environment", "simulator") else set()
    assert given <= set(parameters), "fields that the part does not take"
    required = {name for name, p in parameters.items() if p.default is p.empty}
    assert required <= given, "parameters that nothing gives"


@pytest.mark.parametrize("key", SCHEMAS, ids="/".join)
def test_every_schema_field_is_documented(key):
    for item in dataclasses.fields(SCHEMAS[key]):
        if item.name == "_target_" or dataclasses.is_dataclass(item.type):
            continue
        doc = item.metadata.get("doc") or _inherited_doc(SCHEMAS[key], item.name)
        assert doc, item.name
        assert doc == doc.strip()
        assert "\n" not in doc


def _inherited_doc(schema, name):
    """Return the documentation of a field from the nearest base class that has it."""
    for base in schema.__mro__[1:]:
        found = getattr(base, "__dataclass_fields__", {}).get(name)
        if found is not None and found.metadata.get("doc"):
            return found.metadata["doc"]
    return ""


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), Config], ids=lambda schema: schema.__name__)
def test_schemas_are_frozen_and_keyword_only(schema):
    assert schema.__dataclass_params__.frozen
    assert all(item.kw_only for item in dataclasses.fields(schema))
    assert schema.__doc__
    assert not schema.__doc__.startswith(f"{schema.__name__}("), "the docstring is the one dataclasses make up"


@pytest.mark.parametrize("path", OPTION_FILES, ids=lambda path: str(path.relative_to(config_dir())))
def test_every_option_file_starts_with_a_comment(path):
    lines = path.read_text().splitlines()
    if lines[0].startswith("# @package"):
        lines = lines[1:]
    top = lines[0]
    if path.parent.parent.name == "hydra" and not top.startswith("#"):
        assert top.startswith("app_name:"), top  # a help page needs no comment
        return
    if not top.startswith("#"):  # an alias has a single line
        assert re.fullmatch(r"defaults: \[\w+\]\s+# \S.*", top), top
        assert len(lines) == 1
        return
    assert re.match(r"# \S", top), top
    assert len(top) > 8
