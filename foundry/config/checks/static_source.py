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

from foundry.config.configured import SETTINGS, requires_value
from foundry.core.part_names import NAMESPACES, current_path, names_in
from foundry.core.safe_path import local_remedy

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_DYNAMIC = {
    *("sys.modules", "__getattr__", "__path__", "globals()", "locals()"),
    *("setattr(", "exec(", "vars(", "import_module("),
}
"""Strings that show that a module may create names during import, so that its source does not determine all names."""
_PLAIN_BASES = {"object", "ABC", "Module", "Generic", "Protocol", "Optimizer", "Dataset", "FSDPBlock", "FrozenLauncher"}
"""Base classes that do not change the parameters of a subclass's `__init__`."""
_DEEPEST = 8


class NameNotFound(Exception):
    """Raised if a module or name definitely cannot be imported; the message continues a sentence after "but"."""

    def __init__(self, message: str, candidates: Iterable[str] = (), word: str = "") -> None:
        super().__init__(message)
        self.word, self.candidates = word, sorted(set(candidates))


@dataclass(frozen=True)
class Parameters:
    """Parameters of a callable.

    Attributes:
        names: names in order, positional parameters first.
        required: names of the parameters without a default.
        max_positional: maximum number of positional arguments.
        has_var_keyword: the callable has `**kwargs`.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    max_positional: int
    has_var_keyword: bool = False


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
        NameNotFound: the module does not exist, or it does not have that name.
    """
    importlib.invalidate_caches()
    _require_public(path)
    module, names = _split(current_path(path))
    if isinstance(module, ModuleSpec) and not names:
        raise NameNotFound("that is a module; name a class or function in it")
    if module.name == "foundry" and names[0] not in dir(sys.modules["foundry"]):
        raise NameNotFound(f"foundry has no {names[0]}", [*names_in("foundry"), *NAMESPACES], names[0])
    source = _source(module)
    if source is None:
        return None
    if len(names) > 1:
        _require_no_misspelt_module(source, names[0])
    return _parameters_in(source, names, 0)


def _require_public(path: str) -> None:
    """Reject unknown names in foundry's namespaces.

    Raises:
        NameNotFound: the namespace does not have that name.
    """
    first, _, rest = path.partition(".")
    namespace, _, name = rest.partition(".")
    owner, name = f"{first}.{namespace}", name.partition(".")[0]
    if owner in NAMESPACES and name not in names_in(owner):
        message = f"{owner} has no {name}" if name else "that is a namespace; name a class or function in it"
        raise NameNotFound(message, names_in(owner), name)


def _require_no_misspelt_module(package: Source, name: str) -> None:
    """Reject a misspelt module name in a package that creates names during import (torch, transformers).

    Names created during import cannot be looked up, but they never resemble the name of a module.

    Raises:
        NameNotFound: the package has a module with a similar name, and its source does not contain the given name.
    """
    modules = [module.name for module in pkgutil.iter_modules(package.folders or ())]
    if difflib.get_close_matches(name, modules, cutoff=0.8) and not re.search(rf"\b{name}\b", package.text):
        raise NameNotFound(f"{package.name} has no {name}", modules, name)


def _split(path: str) -> tuple[ModuleSpec, list[str]]:
    """Split a dotted path into its innermost module and the remaining names.

    Raises:
        NameNotFound: the module does not exist.
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
        raise NameNotFound(
            f"there is no module {first}; Python looks in PYTHONPATH and in installed packages{local_remedy(first)}",
            candidates=[module.name for module in pkgutil.iter_modules(folders)],
            word=first,
        )
    while rest and spec.submodule_search_locations is not None:
        inner = PathFinder.find_spec(f"{spec.name}.{rest[0]}", list(spec.submodule_search_locations))
        if inner is None and f"{spec.name}.{rest[0]}" in sys.modules:  # a module created at run time
            return ModuleSpec(rest[0], None), rest[1:] or rest
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    if rest and spec.submodule_search_locations is not None and spec.origin is None:
        candidates = [module.name for module in pkgutil.iter_modules(list(spec.submodule_search_locations))]
        raise NameNotFound(f"{spec.name} has no module {rest[0]}", candidates, rest[0])
    return spec, rest


def _source(spec: ModuleSpec) -> Source | None:
    """Return the source of a module, or None if it has no readable Python source.

    Raises:
        NameNotFound: the source has a syntax error, so nothing can be imported from it.
    """
    if spec.origin is None or not spec.origin.endswith(".py") or not Path(spec.origin).is_file():
        return None
    status, folders = Path(spec.origin).stat(), spec.submodule_search_locations
    try:
        tree, text = _parse_file(spec.origin, status.st_mtime_ns, status.st_size)
    except SyntaxError as error:
        raise NameNotFound(f"{spec.origin} line {error.lineno} is not valid Python: {error.msg}") from None
    except (ValueError, OSError, RecursionError):
        return None
    return Source(spec.name, None if folders is None else tuple(folders), tree, text)


@lru_cache(maxsize=64)
def _parse_file(path: str, modified: int, size: int) -> tuple[ast.Module, str]:
    data = Path(path).read_bytes()
    return ast.parse(data), data.decode("utf-8", "replace")


def _parameters_in(source: Source, names: Sequence[str], depth: int) -> Parameters | None:
    """Return the parameters of the definition with these (nested) names in a module, or None if unknown.

    Raises:
        NameNotFound: the module definitely does not have the name.
    """
    match = _lookup(source, names[0], depth)
    if match is None:
        return None
    source, definition = match
    if isinstance(definition, ast.ClassDef):
        if len(names) == 1:
            return _constructor(source, definition, depth)
        return _method(source, definition, names[1:])
    return _function_parameters(source, definition) if len(names) == 1 else None


def _lookup(source: Source, name: str, depth: int) -> tuple[Source, Definition] | None:
    """Return the definition of a name in a module, following imports; None if unknown, such as a name bound twice.

    Raises:
        NameNotFound: the module definitely does not have the name.
    """
    definitions = [node for node in source.tree.body if isinstance(node, Definition) and node.name == name]
    bound_names = list(_bound_names(source.tree))
    if bound_names.count(name) == 1 and definitions:
        return source, definitions[0]
    if bound_names.count(name) == 0 and not source.is_dynamic:
        modules = [module.name for module in pkgutil.iter_modules(source.folders or ())]
        raise NameNotFound(f"{source.name} has no {name}", [*bound_names, *modules], name)
    imports = [
        (node, alias)
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name) == name
    ]
    if bound_names.count(name) != 1 or not imports or depth > _DEEPEST:
        return None
    (node, alias) = imports[0]
    try:
        spec, rest = _split(current_path(f"{_absolute(source, node)}.{alias.name}"))
        inner = _source(spec) if len(rest) == 1 else None
        return None if inner is None else _lookup(inner, rest[0], depth + 1)
    except NameNotFound:  # not reported: importing the module raises the error
        return None


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in a `from` import."""
    if node.level == 0:
        return node.module or ""
    parts = source.name.split(".")
    package_parts = parts[: len(parts) - node.level + (0 if source.folders is None else 1)]
    return ".".join([*package_parts, node.module] if node.module else package_parts)


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield each name that the code of a module or class can bind, once for each binding."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child.name
            yield from (name for sub in ast.walk(child) if isinstance(sub, ast.Global) for name in sub.names)
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
            yield child.id
        yield from _bound_names(child)


def _constructor(source: Source, definition: ast.ClassDef, depth: int) -> Parameters | None:
    """Return the parameters of a class's constructor, or None if unknown."""
    if not _is_plain(source, definition, depth):
        return None
    if definition.decorator_list:
        return _dataclass_parameters(definition)
    constructors = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if len(constructors) == 1 and _body_names(definition).count("__init__") == 1:
        return _function_parameters(source, constructors[0], skip=1)
    if not definition.bases and "__init__" not in _body_names(definition):
        return Parameters((), frozenset(), 0)
    if "__init__" in _body_names(definition) or len(definition.bases) != 1:
        return None
    parent = _base(source, definition.bases[0], depth)
    return None if parent is None else _constructor(*parent, depth + 1)


def _is_plain(source: Source, definition: ast.ClassDef, depth: int) -> bool:
    """Return True if the `__init__` of a class or of its parent alone determines the constructor's parameters."""
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
        match = _lookup(source, base.id, depth + 1)
    except NameNotFound:
        return None
    if match is None or not isinstance(match[1], ast.ClassDef):
        return None
    return match[0], match[1]


def _body_names(definition: ast.ClassDef) -> list[str]:
    return list(_bound_names(ast.Module(definition.body, [])))


def _dataclass_parameters(definition: ast.ClassDef) -> Parameters | None:
    """Return the parameters of a dataclass without base classes and other decorators; None for other classes."""
    (decorator, *other_decorators) = definition.decorator_list
    call = decorator if isinstance(decorator, ast.Call) else None
    name = ast.unparse(call.func if call else decorator).rpartition(".")[2]
    if (
        other_decorators
        or name != "dataclass"
        or definition.bases
        or (call and any(k.arg == "init" for k in call.keywords))
    ):
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
    methods = [node for node in definition.body if isinstance(node, Definition) and node.name == names[0]]
    has_all_names = not (definition.bases or definition.keywords or definition.decorator_list)
    if names[0] not in _body_names(definition) and has_all_names:
        names_in_class = [node.name for node in definition.body if isinstance(node, Definition)]
        raise NameNotFound(f"{definition.name} has no {names[0]}", names_in_class, names[0])
    if len(names) != 1 or len(methods) != 1 or not isinstance(methods[0], ast.FunctionDef):
        return None
    match methods[0].decorator_list:
        case [ast.Name("classmethod" | "staticmethod" as kind), *others]:
            return _decorated_parameters(source, methods[0].args, 1 if kind == "classmethod" else 0, others)
    return None


def _function_parameters(source: Source, definition: Definition, skip: int = 0) -> Parameters | None:
    """Return the parameters of a function without the first `skip`, such as `self`; None if unknown."""
    if isinstance(definition, ast.ClassDef):
        return None
    return _decorated_parameters(source, definition.args, skip, definition.decorator_list)


def _decorated_parameters(
    source: Source, arguments: ast.arguments, skip: int, decorators: Sequence[ast.expr]
) -> Parameters | None:
    if not decorators:
        return _argument_parameters(arguments, skip)
    return _configured_parameters(source, arguments, skip, decorators[0]) if len(decorators) == 1 else None


def _configured_parameters(
    source: Source, arguments: ast.arguments, skip: int, decorator: ast.expr
) -> Parameters | None:
    """Return the parameters of a function decorated by `configured_by`: its own, and the fields of the schema."""
    match decorator:
        case ast.Call(func=ast.Name("configured_by"), args=[ast.Name(name)]):
            imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom)]
            schema_imports = [
                (node, alias.name) for node in imports for alias in node.names if name == (alias.asname or alias.name)
            ]
        case _:
            return None
    parameters, module = (
        _argument_parameters(arguments, skip),
        _absolute(source, schema_imports[0][0]) if len(schema_imports) == 1 else "",
    )
    if parameters is None or not (module in sys.modules or module.startswith("foundry.")):
        return None
    required_settings = requires_value(getattr(importlib.import_module(module), schema_imports[0][1]))
    names = [name for name in parameters.names if name != SETTINGS]
    setting_names = {name: is_needed for name, is_needed in required_settings.items() if name not in names}
    required = parameters.required - {SETTINGS} | {name for name, is_needed in setting_names.items() if is_needed}
    return replace(parameters, names=(*names, *setting_names), required=required)


def _argument_parameters(arguments: ast.arguments, skip: int) -> Parameters | None:
    if arguments.posonlyargs:
        return None
    positional = [argument.arg for argument in arguments.args]
    required = set(positional[: len(positional) - len(arguments.defaults)][skip:])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is None:
            required.add(argument.arg)
    names = (*positional[skip:], *(argument.arg for argument in arguments.kwonlyargs))
    max_positional = sys.maxsize if arguments.vararg else len(positional) - skip
    return Parameters(names, frozenset(required), max_positional, has_var_keyword=arguments.kwarg is not None)
