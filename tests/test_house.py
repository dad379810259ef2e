"""The structure of the package: its rooms, the imports between them, and fields declared more than once.

Each limit is the count of today, and only ever lowered. Arrows of tasks are not counted: no room stands on a task.
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
ARROWS = 121
CIRCLES = []
PARAMETERS, SECOND_DEFAULTS = 251, 137


@pytest.fixture(scope="module")
def house():
    return measure(PACKAGE)


def test_floors_and_arrows_stay_within_their_limits(house):
    assert max(house.floors().values()) <= FLOORS
    assert len([pair for pair in house.arrows if not pair[0].startswith("tasks.")]) <= ARROWS
    assert set(house.circles()) <= set(CIRCLES)


def test_no_folder_has_more_modules_than_a_reader_can_survey():
    folders = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert {str(folder.relative_to(PACKAGE)): count for folder, count in folders.items() if count > MODULES} == {}


def test_every_room_says_in_a_sentence_what_belongs_there():
    docs = {path: ast.get_docstring(ast.parse(path.read_text())) for path in PACKAGE.glob("*/__init__.py")}
    assert [str(path) for path, doc in docs.items() if not doc or not doc.endswith(".")] == []


def test_rooms_outside_tasks_import_no_task(house):
    into = {pair: modules for pair, modules in house.arrows.items() if pair[1].startswith("tasks.")}
    assert {pair: modules for pair, modules in into.items() if not pair[0].startswith("tasks.")} == {}


def test_modules_outside_tasks_name_no_task():
    """But for the list of the built-in ones, and the table of modules that have moved."""
    tasks = sorted(path.parent.name for path in (PACKAGE / "tasks").glob("*/__init__.py"))
    others = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "tasks"]
    naming = [path.name for path in others for task in tasks if f"tasks.{task}" in path.read_text()]
    assert set(naming) <= {"moved_modules.py"}


def test_fields_declared_twice_stay_within_their_limits():
    declared = fields_of_parts()
    assert sum(field.is_parameter for field in declared) <= PARAMETERS
    assert sum(field.has_second_default for field in declared) <= SECOND_DEFAULTS


def write(root, **modules):
    for name, text in modules.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return measure(root)


def test_imports_in_functions_count_and_those_for_types_do_not(tmp_path):
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


def test_rooms_of_a_circle_share_a_floor():
    arrows = dict.fromkeys([("a", "b"), ("b", "c"), ("c", "b"), ("b", "d")], frozenset("x"))
    house = House({name: name for name in "abcd"}, arrows)
    assert house.circles() == [("b", "c")]
    assert house.floors() == {"d": 1, "b": 2, "c": 2, "a": 3}
