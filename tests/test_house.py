"""Limits on the package structure: rooms (subpackages), imports between them, and duplicated field declarations.

Each limit is the current count and may only be lowered. ARROWS excludes imports by tasks; only tasks import tasks.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest
from support.declarations import fields_of_parts
from support.house import House, measure

PACKAGE = Path(__file__).resolve().parent.parent / "foundry"
FLOORS = 12
MODULES = 20
ARROWS = 106
CIRCLES = []
PARAMETERS, SECOND_DEFAULTS = 1, 0


@pytest.fixture(scope="module")
def house():
    return measure(PACKAGE)


def test_package_layers_imports_and_cycles_stay_within_their_limits(house):
    assert max(house.floors().values()) <= FLOORS
    assert len([pair for pair in house.arrows if not pair[0].startswith("tasks.")]) <= ARROWS
    assert set(house.circles()) <= set(CIRCLES)


def test_number_of_modules_per_folder_stays_within_its_limit():
    folders = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert {str(folder.relative_to(PACKAGE)): count for folder, count in folders.items() if count > MODULES} == {}


def test_every_room_has_a_docstring():
    docs = {path: ast.get_docstring(ast.parse(path.read_text())) for path in PACKAGE.glob("*/__init__.py")}
    assert [str(path) for path, doc in docs.items() if not doc or not doc.endswith(".")] == []


def test_rooms_outside_tasks_do_not_import_tasks(house):
    into = {pair: modules for pair, modules in house.arrows.items() if pair[1].startswith("tasks.")}
    assert {pair: modules for pair, modules in into.items() if not pair[0].startswith("tasks.")} == {}


def test_modules_outside_tasks_do_not_name_tasks():
    """Only moved_modules.py may name a task."""
    tasks = sorted(path.parent.name for path in (PACKAGE / "tasks").glob("*/__init__.py"))
    others = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "tasks"]
    naming = [path.name for path in others for task in tasks if f"tasks.{task}" in path.read_text()]
    assert set(naming) <= {"moved_modules.py"}


def test_duplicated_field_declarations_stay_within_their_limits():
    declared = fields_of_parts()
    assert sum(field.is_parameter for field in declared) <= PARAMETERS
    assert sum(field.has_second_default for field in declared) <= SECOND_DEFAULTS


def write(root, **modules):
    for name, text in modules.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return measure(root)


def test_measure_counts_imports_in_functions_but_not_for_type_checking(tmp_path):
    house = write(
        tmp_path,
        low__one="x = 1\n",
        high__one="def f():\n    from foundry.low import one\n",
        typed__one="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foundry.low.one import x\n",
        top="import foundry.high.one\n",
        tasks__robots__arm="import foundry.high.one\n",
    )
    assert house.rooms == ["high", "low", "tasks.robots", "typed"]
    assert house.arrows == {
        ("high", "low"): frozenset({"foundry.high.one"}),
        ("tasks.robots", "high"): frozenset({"foundry.tasks.robots.arm"}),
    }
    assert house.floors() == {"low": 1, "high": 2, "tasks.robots": 3, "typed": 1}


def test_rooms_of_an_import_cycle_share_a_floor():
    arrows = dict.fromkeys([("a", "b"), ("b", "c"), ("c", "b"), ("b", "d")], frozenset("x"))
    house = House({name: name for name in "abcd"}, arrows)
    assert house.circles() == [("b", "c")]
    assert house.floors() == {"d": 1, "b": 2, "c": 2, "a": 3}
