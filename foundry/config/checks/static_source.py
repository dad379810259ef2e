"""Static lookup of a class or function by its dotted path, and of its parameters, without execution of its code.

Importing a user-defined part would import torch and run the module's code. If the source does not determine the result,
as with compiled code, names created during import, or decorators, the result is None (unknown).
"""

import ast
import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from foundry.config.configured import SETTINGS, needed_settings
from foundry.core.part_names import NAMESPACES, names_in, place_of
from foundry.core.safe_path import local_remedy

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_DYNAMIC = {
    *("sys.modules", "__getattr__", "__path__", "globals()", "locals()"),
    *("setattr(", "exec(", "vars(", "import_module("),
}
"""Strings in the source of a module whose names cannot all be determined statically."""
_PLAIN_BASES = {"object", "ABC", "Module", "Generic", "Protocol", "Optimizer", "Dataset", "FSDPBlock"}
"""Base classes that do not change the parameters of a subclass's `__init__`."""
_DEEPEST = 8


class NotThere(Exception):
    """Raised if a module or name definitely does not exist; the message continues a sentence after "but"."""

    def __init__(self, message: str, among: Iterable[str] = (), word: str = "") -> None:
        super().__init__(message)
        self.word, self.among = word, sorted(set(among))


@dataclass(frozen=True)
class Parameters:
    """Parameters of a callable.

    Attributes:
        names: names in order, positional parameters first.
        required: names of the parameters without a default.
        by_place: maximum number of positional arguments.
        takes_any: the callable has `**kwargs`.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    by_place: int
    takes_any: bool = False


@dataclass(frozen=True)
class Source:
    """Source of a module, read without import; `folders` are the search locations of a package, None for a module."""

    name: str
    folders: tuple[str, ...] | None
    tree: ast.Module
    text: str

    @property
    def is_dynamic(self) -> bool:
        """True if the module may have names that cannot be determined statically."""
        stars = any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(self.tree))
        return stars or any(word in self.text for word in _DYNAMIC)


def resolve_parameters(path: str) -> Parameters | None:
    """Return the parameters of the class or function at a dotted path, or None if its source does not determine them.

    Raises:
        NotThere: the module does not exist, or it does not have that name.
    """
    importlib.invalidate_caches()
    _require_public(path)
    module, names = _split(place_of(path))
    if isinstance(module, ModuleSpec) and not names:
        raise NotThere("that is a module; name a class or function in it")
    if module.name == "foundry" and names[0] not in dir(sys.modules["foundry"]):
        raise NotThere(f"foundry has no {names[0]}", [*names_in("foundry"), *NAMESPACES], names[0])
    source = _source(module)
    if source is None:
        return None
    if len(names) > 1:
        _require_no_misspelt_module(source, names[0])
    return _parameters_in(source, names, 0)


def _require_public(path: str) -> None:
    """Reject unknown names in foundry's namespaces.

    Raises:
        NotThere: the namespace does not have that name.
    """
    first, _, rest = path.partition(".")
    namespace, _, name = rest.partition(".")
    owner, name = f"{first}.{namespace}", name.partition(".")[0]
    if owner in NAMESPACES and name not in names_in(owner):
        message = f"{owner} has no {name}" if name else "that is a namespace; name a class or function in it"
        raise NotThere(message, names_in(owner), name)


def _require_no_misspelt_module(package: Source, name: str) -> None:
    """Reject a misspelt module name in a package that creates names during import (torch, transformers).

    These names cannot be looked up, but they never resemble the name of a module.

    Raises:
        NotThere: the package has a module with a similar name, and its source does not contain the given name.
    """
    modules = [module.name for module in pkgutil.iter_modules(package.folders or ())]
    if difflib.get_close_matches(name, modules, cutoff=0.8) and not re.search(rf"\b{name}\b", package.text):
        raise NotThere(f"{package.name} has no {name}", modules, name)


def _split(path: str) -> tuple[ModuleSpec, list[str]]:
    """Split a dotted path into its innermost module and the remaining names.

    Raises:
        NotThere: the module does not exist.
    """
    first, *rest = path.split(".")
    try:
        spec = find_spec(first)
    except (ValueError, ImportError):  # such as __main__
        spec = sys.modules[first].__spec__ if first in sys.modules else None
        if spec is None:
            return ModuleSpec(first, None), rest or [first]
    if spec is None:
        folders = [entry or "." for entry in sys.path if not entry.endswith((".zip", "-packages", "lib-dynload"))]
        raise NotThere(
            f"there is no module {first}; Python looks in PYTHONPATH and in installed packages{local_remedy(first)}",
            among=[found.name for found in pkgutil.iter_modules(folders)],
            word=first,
        )
    while rest and spec.submodule_search_locations is not None:
        inner = PathFinder.find_spec(f"{spec.name}.{rest[0]}", list(spec.submodule_search_locations))
        if inner is None and f"{spec.name}.{rest[0]}" in sys.modules:  # created at run time
            return ModuleSpec(rest[0], None), rest[1:] or rest
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    if rest and spec.submodule_search_locations is not None and spec.origin is None:
        among = [found.name for found in pkgutil.iter_modules(list(spec.submodule_search_locations))]
        raise NotThere(f"{spec.name} has no module {rest[0]}", among, rest[0])
    return spec, rest


def _source(spec: ModuleSpec) -> Source | None:
    """Return the source of a module, or None if it has no readable Python source.

    Raises:
        NotThere: the source has a syntax error, so nothing can be imported from it.
    """
    if spec.origin is None or not spec.origin.endswith(".py") or not Path(spec.origin).is_file():
        return None
    found, folders = Path(spec.origin).stat(), spec.submodule_search_locations
    try:
        tree, text = _parsed(spec.origin, found.st_mtime_ns, found.st_size)
    except SyntaxError as error:
        raise NotThere(f"{spec.origin} line {error.lineno} is not valid Python: {error.msg}") from None
    except (ValueError, OSError, RecursionError):
        return None
    return Source(spec.name, None if folders is None else tuple(folders), tree, text)


@lru_cache(maxsize=64)
def _parsed(path: str, modified: int, size: int) -> tuple[ast.Module, str]:
    data = Path(path).read_bytes()
    return ast.parse(data), data.decode("utf-8", "replace")


def _parameters_in(source: Source, names: Sequence[str], depth: int) -> Parameters | None:
    """Return the parameters of the definition with these (nested) names in a module, or None if unknown.

    Raises:
        NotThere: the module definitely does not have the name.
    """
    found = _lookup(source, names[0], depth)
    if found is None:
        return None
    source, definition = found
    if isinstance(definition, ast.ClassDef):
        if len(names) == 1:
            return _constructor(source, definition, depth)
        return _method(source, definition, names[1:])
    return _of_function(source, definition) if len(names) == 1 else None


def _lookup(source: Source, name: str, depth: int) -> tuple[Source, Definition] | None:
    """Return the definition of a name in a module, following imports; None if it is not defined exactly once.

    Raises:
        NotThere: the module definitely does not have the name.
    """
    defined = [node for node in source.tree.body if isinstance(node, Definition) and node.name == name]
    given = list(_given_names(source.tree))
    if given.count(name) == 1 and defined:
        return source, defined[0]
    if given.count(name) == 0 and not source.is_dynamic:
        modules = [module.name for module in pkgutil.iter_modules(source.folders or ())]
        raise NotThere(f"{source.name} has no {name}", [*given, *modules], name)
    imports = [
        (node, alias)
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name) == name
    ]
    if given.count(name) != 1 or not imports or depth > _DEEPEST:
        return None
    (node, alias) = imports[0]
    try:
        spec, rest = _split(place_of(f"{_absolute(source, node)}.{alias.name}"))
        inner = _source(spec) if len(rest) == 1 else None
        return None if inner is None else _lookup(inner, rest[0], depth + 1)
    except NotThere:  # not reported: importing the module raises the error
        return None


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in a `from` import."""
    if node.level == 0:
        return node.module or ""
    parts = source.name.split(".")
    kept = parts[: len(parts) - node.level + (0 if source.folders is None else 1)]
    return ".".join([*kept, node.module] if node.module else kept)


def _given_names(node: ast.AST) -> Iterator[str]:
    """Yield each name that the module's code can bind, once for each binding."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child.name
            yield from (name for sub in ast.walk(child) if isinstance(sub, ast.Global) for name in sub.names)
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
            yield child.id
        yield from _given_names(child)


def _constructor(source: Source, definition: ast.ClassDef, depth: int) -> Parameters | None:
    """Return the parameters of a class's constructor, or None if unknown."""
    if not _is_plain(source, definition, depth):
        return None
    if definition.decorator_list:
        return _of_dataclass(definition)
    own = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if len(own) == 1 and _body_names(definition).count("__init__") == 1:
        return _of_function(source, own[0], skip=1)
    if not definition.bases and "__init__" not in _body_names(definition):
        return Parameters((), frozenset(), 0)
    if "__init__" in _body_names(definition) or len(definition.bases) != 1:
        return None
    parent = _base(source, definition.bases[0], depth)
    return None if parent is None else _constructor(*parent, depth + 1)


def _is_plain(source: Source, definition: ast.ClassDef, depth: int) -> bool:
    """Return whether `__init__` alone determines the constructor's parameters."""
    if definition.keywords or "__new__" in _body_names(definition) or depth > _DEEPEST:
        return False
    for base in definition.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name not in _PLAIN_BASES:
            parent = _base(source, base, depth)
            if parent is None or parent[1].decorator_list or not _is_plain(*parent, depth + 1):
                return False
    return True


def _base(source: Source, base: ast.expr, depth: int) -> tuple[Source, ast.ClassDef] | None:
    if not isinstance(base, ast.Name):
        return None
    try:
        found = _lookup(source, base.id, depth + 1)
    except NotThere:
        return None
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    return found[0], found[1]


def _body_names(definition: ast.ClassDef) -> list[str]:
    return list(_given_names(ast.Module(definition.body, [])))


def _of_dataclass(definition: ast.ClassDef) -> Parameters | None:
    """Return the parameters of a dataclass without base classes and other decorators; None for other classes."""
    (decorator, *others) = definition.decorator_list
    call = decorator if isinstance(decorator, ast.Call) else None
    name = ast.unparse(call.func if call else decorator).rpartition(".")[2]
    if others or name != "dataclass" or definition.bases or (call and any(k.arg == "init" for k in call.keywords)):
        return None
    if "__init__" in _body_names(definition):
        return None
    names, required = list[str](), set[str]()
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if any(word in ast.unparse(node.annotation) for word in ("ClassVar", "KW_ONLY")):
            continue
        options = {k.arg for k in node.value.keywords} if isinstance(node.value, ast.Call) else set()
        if "init" in options:
            return None
        names.append(node.target.id)
        is_field = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).rpartition(".")[2] == "field"
        if node.value is None or (is_field and not options & {"default", "default_factory"}):
            required.add(node.target.id)
    return Parameters(tuple(names), frozenset(required), len(names))


def _method(source: Source, definition: ast.ClassDef, names: Sequence[str]) -> Parameters | None:
    """Return the parameters of a class method or static method, or None if unknown."""
    own = [node for node in definition.body if isinstance(node, Definition) and node.name == names[0]]
    is_whole = not (definition.bases or definition.keywords or definition.decorator_list)
    if names[0] not in _body_names(definition) and is_whole:
        what = [node.name for node in definition.body if isinstance(node, Definition)]
        raise NotThere(f"{definition.name} has no {names[0]}", what, names[0])
    if len(names) != 1 or len(own) != 1 or not isinstance(own[0], ast.FunctionDef):
        return None
    match own[0].decorator_list:
        case [ast.Name("classmethod" | "staticmethod" as kind), *others]:
            return _of_decorated(source, own[0].args, 1 if kind == "classmethod" else 0, others)
    return None


def _of_function(source: Source, definition: Definition, skip: int = 0) -> Parameters | None:
    """Return the parameters of a function; `skip` is 1 for a method."""
    if isinstance(definition, ast.ClassDef):
        return None
    return _of_decorated(source, definition.args, skip, definition.decorator_list)


def _of_decorated(
    source: Source, arguments: ast.arguments, skip: int, decorators: Sequence[ast.expr]
) -> Parameters | None:
    if not decorators:
        return _of_arguments(arguments, skip)
    return _of_configured(source, arguments, skip, decorators[0]) if len(decorators) == 1 else None


def _of_configured(source: Source, arguments: ast.arguments, skip: int, decorator: ast.expr) -> Parameters | None:
    """Return the parameters of a function decorated by `configured_by`: its own, and the fields of the schema."""
    match decorator:
        case ast.Call(func=ast.Name("configured_by"), args=[ast.Name(name)]):
            imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom)]
            found = [
                (node, alias.name) for node in imports for alias in node.names if name == (alias.asname or alias.name)
            ]
        case _:
            return None
    own, module = _of_arguments(arguments, skip), _absolute(source, found[0][0]) if len(found) == 1 else ""
    if own is None or not (module in sys.modules or module.startswith("foundry.")):
        return None
    needs = needed_settings(getattr(importlib.import_module(module), found[0][1]))
    names = [name for name in own.names if name != SETTINGS]
    added = {name: is_needed for name, is_needed in needs.items() if name not in names}
    required = own.required - {SETTINGS} | {name for name, is_needed in added.items() if is_needed}
    return replace(own, names=(*names, *added), required=required)


def _of_arguments(arguments: ast.arguments, skip: int) -> Parameters | None:
    if arguments.posonlyargs:
        return None
    by_place = [argument.arg for argument in arguments.args]
    required = set(by_place[: len(by_place) - len(arguments.defaults)][skip:])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is None:
            required.add(argument.arg)
    names = (*by_place[skip:], *(argument.arg for argument in arguments.kwonlyargs))
    places = sys.maxsize if arguments.vararg else len(by_place) - skip
    return Parameters(names, frozenset(required), places, takes_any=arguments.kwarg is not None)
