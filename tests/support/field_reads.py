"""Record the settings that each test depends on, or ignore a setting; used by `tests/mutate_fields.py`.

Every process that imports this package reads `FOUNDRY_FIELDS`, including ranks and warm commands:

- `record:FOLDER` records each test that has a run with a non-default value of a field;
- `ignore:KEY` gives every run the default of one field, such as `DDP.bucket_cap_mb`; `ignore:KEY@READER` is limited to
  one module, such as `DDP.bucket_cap_mb@parallel/wrap.py`, or to the construction of parts with `@build`;
- `on` makes fields readable through descriptors; `state` then controls their values.

A run uses a field if code of the run reads it from its schema, or calls a part with it. Checks, records and plans of a
configuration and the tests themselves always read the user's value.
"""

import functools
import os
import sys
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "FOUNDRY_FIELDS"
_TESTS = str(Path(__file__).resolve().parents[1]) + os.sep
_PACKAGE = str(Path(_TESTS).parent / "foundry") + os.sep
_CONFIG = _PACKAGE + f"config{os.sep}"
_BUILD = f"{_CONFIG}build.py"
# Packages and modules that describe a run without training.
_DESCRIBING = tuple(
    _PACKAGE + name
    for name in (
        "commands/diff.py",
        "commands/model_card.py",
        "commands/plan.py",
        "commands/report.py",
        "commands/train.py",
        "planning",
        "rehearsal",
        "sweeps",
        "training/memory_error.py",
    )
)
# Folders and modules of the configuration that check, record or compare it.
_CHECKING = tuple(_CONFIG + name for name in ("checks", "composition", "diagnostics", "record", "teacher.py"))
_NO_DEFAULT = object()


@dataclass
class State:
    """Treatment of fields in this process.

    Attributes:
        ignored: key of the field that runs ignore; None ignores no field.
        folder: folder of the record; None disables recording.
        test: node id of the running test, in the process of pytest.
        phase: `setup` or `call`.
    """

    ignored: str | None = None
    folder: Path | None = None
    test: str | None = None
    phase: str = "setup"

    def concerns(self, key: str) -> bool:
        """Return whether uses of a field are recorded or ignored."""
        return self.folder is not None or (self.ignored is not None and self.ignored.partition("@")[0] == key)


state = State()
noted: set[tuple[str, ...]] = set()
defaults: dict[str, Any] = {}
"""Default values by key, `Class.field`, of the class that declares the field."""


def install() -> None:
    """Replace the fields of all schemas by descriptors, and wrap all parts that are built from them."""
    verb, _, argument = os.environ[VARIABLE].partition(":")
    if verb == "ignore":
        state.ignored = argument
    elif verb == "record":
        state.folder = Path(argument) / os.environ.get("PYTEST_XDIST_WORKER", "main")
        state.folder.mkdir(parents=True, exist_ok=True)
    if defaults:
        return
    parts: dict[str, dict[str, str]] = {}
    for schema in _schemas():
        keys = {}
        for item in fields(schema):
            owner = next(base for base in schema.__mro__ if item.name in vars(base).get("__annotations__", {}))
            key, default = f"{owner.__name__}.{item.name}", _default(item)
            if item.name in ("_target_", "strategy") or default is _NO_DEFAULT:
                continue
            if key not in defaults:
                defaults[key] = default
                setattr(owner, item.name, _Field(key, item.name))
            keys[item.name] = key
        target = next((item.default for item in fields(schema) if item.name == "_target_"), None)
        if isinstance(target, str) and target.startswith("foundry."):
            parts.setdefault(target, {}).update(keys)
    for target, keys in parts.items():
        _wrap(target, keys)


def _schemas():
    from foundry.config.composition.store import GROUPS, evaluator_schemas, group_schemas, schemas_in
    from foundry.config.schemas import built_in_trackers

    groups = [schema for group in GROUPS for schema in group_schemas(group).values()]
    return [*groups, *evaluator_schemas(), *schemas_in(built_in_trackers)]


def _default(item):
    value = item.default if item.default_factory is MISSING else item.default_factory()
    is_none = value is MISSING or is_dataclass(value) or value == "???"
    return _NO_DEFAULT if is_none else value


class _Field:
    """A field of a schema, as a data descriptor."""

    def __init__(self, key, name):
        self.key, self.name = key, name

    def __get__(self, node, owner=None):
        if node is None:
            return defaults[self.key]
        try:
            value = vars(node)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None
        if not state.concerns(self.key) or value == defaults[self.key]:
            return value
        reader = _reader(sys._getframe(1))
        return value if reader is None else use(self.key, reader, value)

    def __set__(self, node, value):
        vars(node)[self.name] = value


def use(key, reader, value):
    """Return the value for the run: the non-default value of the user, or the default if the field is ignored."""
    if state.ignored in (key, f"{key}@{reader}"):
        return defaults[key]
    if state.folder is not None:
        _note(key, reader)
    return value


def _reader(frame) -> str | None:
    """Return the module of the run that reads the field, or None for checks, records, plans and tests."""
    is_config = False
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path == _BUILD and name != "field_of":
            return "build"
        if path.startswith(_CONFIG):
            is_config = is_config or not (name == "field_of" or path.endswith("setting.py"))
            if path.startswith(_CHECKING) or name.lstrip("_").startswith("check"):
                return None
        elif path.startswith(_TESTS):
            return "config" if is_config else None
        elif path.startswith(_PACKAGE):
            return None if path.startswith(_DESCRIBING) else path.removeprefix(_PACKAGE)
        frame = frame.f_back
    return None


def _wrap(target: str, keys: dict[str, str]) -> None:
    """Wrap a part (class, function or class method) so that its arguments pass through `use`."""
    module_name, _, name = target.rpartition(".")
    try:
        owner: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if not module_name.startswith(error.name or "?"):
            return  # optional package is missing
        above, _, class_name = module_name.rpartition(".")
        owner = getattr(import_module(above), class_name)
    part = getattr(owner, name)
    if isinstance(part, type):
        part.__init__ = _wrapped(part.__init__, keys)
    elif isinstance(owner, type):
        setattr(owner, name, classmethod(_wrapped(part.__func__, keys)))
    else:
        wrapper = _wrapped(part, keys)
        for module in [module for name, module in sys.modules.items() if name.startswith("foundry.")]:
            for other in [other for other, value in vars(module).items() if value is part]:
                setattr(module, other, wrapper)


def _wrapped(function, keys):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for name in kwargs.keys() & keys.keys():
            if kwargs[name] != defaults[keys[name]]:
                kwargs[name] = use(keys[name], "build", kwargs[name])
        return function(*args, **kwargs)

    return wrapper


def _note(key: str, reader: str) -> None:
    """Record that the running test uses a field."""
    current = (state.test, state.phase) if state.test is not None else _read_current()
    if current is None or (key, reader, *current) in noted:
        return
    noted.add((key, reader, *current))
    with (state.folder / f"uses-{os.getpid()}").open("a") as file:
        file.write("\t".join((key, reader, *current)) + "\n")


def _read_current():
    """Return the running test and its phase from the file written by pytest, or None."""
    try:
        test, phase = (state.folder / "current").read_text().split("\t")
    except (OSError, ValueError):
        return None
    return test, phase


def _enter(test: str, phase: str) -> None:
    if state.folder is not None:
        state.test, state.phase = test, phase
        path = state.folder / "current"
        path.with_suffix(".new").write_text(f"{test}\t{phase}")
        path.with_suffix(".new").replace(path)


# Hooks of the pytest plugin `-p support.field_reads`.


def pytest_runtest_setup(item):
    _enter(item.nodeid, "setup")


def pytest_runtest_call(item):
    _enter(item.nodeid, "call")


def pytest_runtest_logreport(report):
    if state.folder is not None and state.test is not None and report.when != "teardown":
        with (state.folder / "seconds").open("a") as file:
            file.write(f"{report.duration:.3f}\t{report.when}\t{report.outcome}\t{report.nodeid}\n")
