"""Imports, pickles and commands under the old names of moved modules."""

import importlib
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

import foundry
from foundry.config.checks.static_source import NameNotFound, resolve_parameters
from foundry.core import errors, moved_modules
from foundry.core.duration import Duration
from foundry.core.moved_modules import MOVED, MovedModules, current_name, find_moved
from foundry.run_dir import names

ENTRIES = {
    "foundry.records": "foundry.run_dir",
    "foundry.records.timing": "foundry.core.duration",
    "foundry.begin": "foundry.records_of_old",
    "foundry.records_of_old": "foundry.run_dir",
    "foundry.scattered.here.lengths": "foundry.config.lengths",
    "foundry.config.old_base": "foundry.config.composition.base",
    "foundry.core.errors.Length": "foundry.core.duration.Duration",
}


@pytest.fixture
def moved(monkeypatch):
    """Replace the table of moved modules by `ENTRIES`; afterwards remove the modules under their old names."""
    before, attributes = (
        set(sys.modules),
        {name: set(vars(sys.modules[name])) for name in ("foundry", "foundry.config")},
    )
    monkeypatch.setattr(moved_modules, "MOVED", ENTRIES)
    yield
    for name in set(sys.modules) - before:
        if current_name(name) != name or name.startswith("foundry.scattered"):
            del sys.modules[name]
    for owner, known in attributes.items():
        for name in set(vars(sys.modules[owner])) - known:
            if any(f"{owner}.{name}" == old or old.startswith(f"{owner}.{name}.") for old in ENTRIES):
                delattr(sys.modules[owner], name)


@pytest.mark.usefixtures("moved")
def test_old_module_name_imports_the_moved_module():
    own_spec = names.__spec__
    for old, new in {
        "foundry.records": "foundry.run_dir",
        "foundry.records.names": "foundry.run_dir.names",
        "foundry.records.timing": "foundry.core.duration",
        "foundry.begin.names": "foundry.run_dir.names",
        "foundry.scattered.here.lengths": "foundry.config.lengths",
        "foundry.config.old_base": "foundry.config.composition.base",
    }.items():
        assert importlib.import_module(old) is importlib.import_module(new) is sys.modules[old]
    assert names.__name__ == "foundry.run_dir.names"
    assert names.__spec__ is own_spec


@pytest.mark.usefixtures("moved")
def test_every_import_form_works_with_old_names():
    scope = {}
    exec("import foundry.scattered.here.lengths\nmodule = foundry.scattered.here.lengths", scope)
    exec("from foundry.config import old_base\nfrom foundry.records.names import CONFIG", scope)
    exec("from foundry.records import names", scope)
    assert scope["module"] is sys.modules["foundry.config.lengths"]
    assert scope["old_base"] is sys.modules["foundry.config.composition.base"]
    assert scope["names"] is names
    assert scope["CONFIG"] == names.CONFIG


@pytest.mark.usefixtures("moved")
def test_old_names_patch_and_unpickle_the_moved_module(monkeypatch):
    monkeypatch.setattr("foundry.records.names.CONFIG", "other.yaml")
    assert names.CONFIG == "other.yaml"
    assert pickle.loads(b"cfoundry.records.timing\nDuration\n.") is Duration


@pytest.mark.usefixtures("moved")
def test_old_dotted_path_resolves_to_the_moved_part():
    assert current_name("foundry.begin.names.CONFIG") == "foundry.run_dir.names.CONFIG"
    assert current_name("foundry.recordsof.names") == "foundry.recordsof.names"
    takes = resolve_parameters("foundry.records.timing.Duration")
    assert takes == resolve_parameters("foundry.core.duration.Duration")
    assert takes is not None
    with pytest.raises(NameNotFound, match="has no Durations"):
        resolve_parameters("foundry.records.timing.Durations")


@pytest.mark.usefixtures("moved")
def test_unknown_module_error_shows_the_requested_name():
    for name in ("foundry.records.nowhere", "foundry.scattered.nowhere", "foundry.nowhere"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)
        assert find_spec(name) is None


@pytest.mark.usefixtures("moved")
def test_moved_class_is_available_in_its_old_module(monkeypatch):
    monkeypatch.setattr(errors, "__getattr__", find_moved(errors.__name__), raising=False)
    exec("from foundry.core.errors import Length", scope := {})
    assert scope["Length"] is Duration
    assert pickle.loads(b"cfoundry.core.errors\nLength\n.") is Duration
    assert resolve_parameters("foundry.core.errors.Length") == resolve_parameters("foundry.core.duration.Duration")
    with pytest.raises(AttributeError, match="has no attribute 'Width'"):
        errors.Width  # noqa: B018


@pytest.mark.long
def test_python_m_runs_a_module_by_its_old_name():
    start = (
        "import runpy, sys\nfrom foundry.core.moved_modules import MOVED\n"
        "MOVED.update({'foundry.begin': 'foundry.new', 'foundry.tools': 'foundry'})\n"
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    for old, new in {"foundry.begin": "foundry.new", "foundry.tools": "foundry"}.items():
        pages = [
            subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True, check=True).stdout
            for words in (["-c", start, old], ["-m", new])
        ]
        assert pages[0] == pages[1] != ""


def test_leftover_folder_at_the_old_path_does_not_shadow_the_module(moved, tmp_path, monkeypatch):
    left = tmp_path / "records" / "__pycache__"
    left.mkdir(parents=True)
    monkeypatch.setattr(foundry, "__path__", [str(tmp_path), *foundry.__path__])
    assert importlib.import_module("foundry.records.names") is names


def test_module_finder_is_installed_once():
    assert sys.meta_path.count(MovedModules) == 1
    importlib.reload(foundry)
    assert sys.meta_path.count(MovedModules) == 1


def test_moved_entries_resolve_and_old_paths_are_free():
    package = Path(foundry.__file__).parent
    for old in MOVED:
        new, steps = old, 0
        while new in MOVED:
            new, steps = MOVED[new], steps + 1
            assert steps <= len(MOVED), old
        taken = package.joinpath(*old.split(".")[1:])
        assert not taken.with_suffix(".py").exists(), f"{old} is a module"
        assert not (taken / "__init__.py").exists(), f"{old} is a package"
        assert resolve_name(old) is resolve_name(new)
