"""Structure of the package, measured on its syntax trees: rooms, imports between them, and floors (layers).

A room is a package directly under `foundry/` or `foundry/tasks/`; top-level modules belong to no room. Imports within
functions count; imports under `if TYPE_CHECKING:` do not.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "foundry"


@dataclass(frozen=True)
class House:
    """Rooms of a package.

    Attributes:
        modules: room of each module, by its dotted name.
        arrows: importing modules by (importing room, imported room).
    """

    modules: dict[str, str]
    arrows: dict[tuple[str, str], frozenset[str]]

    @property
    def rooms(self) -> list[str]:
        """Names of all rooms."""
        return sorted(set(self.modules.values()))

    def circles(self) -> list[tuple[str, ...]]:
        """Return the groups of rooms that import each other, directly or indirectly."""
        return sorted(tuple(sorted(group)) for group in _components(self._below()) if len(group) > 1)

    def floors(self) -> dict[str, int]:
        """Return the floor of each room: 1 without imports of other rooms, else 1 + the highest imported floor.

        Rooms of a circle share a floor.
        """
        below, group_of = self._below(), {}
        for group in _components(below):
            group_of |= dict.fromkeys(group, group)

        @cache
        def height(group: frozenset[str]) -> int:
            return 1 + max((height(group_of[low]) for room in group for low in below[room] - group), default=0)

        return {room: height(group_of[room]) for room in self.rooms}

    def _below(self) -> dict[str, set[str]]:
        return {room: {low for high, low in self.arrows if high == room} for room in self.rooms}


def measure(root: Path) -> House:
    """Measure the package whose modules are in a folder."""
    paths = {_dotted(path, root): path for path in sorted(root.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    modules = {name: room for name, path in paths.items() if (room := _room(path.relative_to(root)))}
    arrows: dict[tuple[str, str], set[str]] = {}
    for name, room in modules.items():
        for imported in _imports(trees[name]):
            other = modules.get(_module(imported, trees) or "")
            if other is not None and other != room:
                arrows.setdefault((room, other), set()).add(name)
    return House(modules, {pair: frozenset(names) for pair, names in arrows.items()})


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((PACKAGE, *(part for part in parts if part != "__init__")))


def _room(path: Path) -> str:
    folders = path.parent.parts
    return ".".join(folders[: 2 if folders[:1] == ("tasks",) else 1])


def _module(imported: str, trees: dict[str, ast.Module]) -> str | None:
    """Return the module of an imported name: the longest prefix that is a module."""
    while imported and imported not in trees:
        imported = imported.rpartition(".")[0]
    return imported or None


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=others):
                for other in others:
                    yield from _imports(other)
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{name.name}" for name in names)
            case _:
                yield from _imports(node)


def _components(below: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return the strongly connected components of a graph; each room is in exactly one."""
    reached = {room: _reach(room, below) for room in below}
    return list({frozenset({room} | {low for low in reached[room] if room in reached[low]}) for room in below})


def _reach(room: str, below: dict[str, set[str]]) -> set[str]:
    seen, queue = set[str](), [room]
    while queue:
        for low in below[queue.pop()]:
            if low not in seen:
                seen.add(low)
                queue.append(low)
    return seen
