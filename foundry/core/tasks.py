"""Registry of tasks: kinds of training, such as robots, that add schemas, data, models, objectives and evaluations.

A task is a package that declares one `Task`. The built-in tasks are listed in `foundry.tasks.BUILT_IN`; other packages
register a task as an entry point of the group `foundry.tasks`. A declaration refers to functions and classes by text,
`module:name`. They are imported on first use, so that reading a declaration does not import torch. No room outside
`foundry/tasks/` imports a task.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any

from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.tasks import BUILT_IN

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "foundry.tasks"
EVALUATORS = "evaluation.evaluators"
"""Key in `Task.schemas` for schemas of evaluators; the user selects an evaluator by `_target_` under a free name."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure in plots/.

    Attributes:
        draw: function of the evaluation values (by metric and step) and the run's name; returns a matplotlib figure, or
            None if there is nothing to plot.
        metrics: names in metrics.jsonl of the metrics in this figure, which metrics.png omits.
    """

    draw: str
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """An evaluation by `foundry.eval`, with additional options.

    Attributes:
        measure: function of the run directory, the command's options, the overrides and `compose`, which composes
            overrides; returns the measurements by name.
        options: frozen dataclass of `setting`s; the command adds its common options, such as `run` and `which`.
        file: name of a file that only run directories with this evaluation contain; empty without such a file.
        groups: config groups that the command line may override in this evaluation.
        described: subject of the evaluation, such as "of policies in a simulator", for errors about options of another
            evaluation.
    """

    measure: str
    options: str
    file: str = ""
    groups: tuple[str, ...] = ()
    described: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """An entry of plan.json.

    Attributes:
        value: function of the configuration; returns plain JSON, or None if the entry does not apply to the run.
        row: function of the result of `value`; returns a row of the printed plan: its name and its text.
    """

    value: str
    row: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Declaration of everything that a task adds to foundry; all attributes except the name are optional.

    Functions and classes are given as `module:name`.

    Attributes:
        name: name of the task in messages; lower case.
        schemas: modules with schemas, by config group or `EVALUATORS`. Their `_target_`s are trusted like foundry's
            own.
        checks: functions of a composed `Config` that yield a `Violation` for each error; called after bounds are
            checked.
        resolvers: functions that compute values of the configuration, by name of the OmegaConf resolver.
        pins: functions of a composed configuration that replace values which may have another meaning later, such as
            `last`, and return the violations that they find; called before the configuration is checked.
        builders: functions that build the part of a config group from its settings, by group. foundry itself has no
            parts for these groups, only the option `none`.
        forms: functions that build data from rows and settings, for datasets with several forms, by form.
        planned: entries of plan.json by name.
        objectives: base classes of objectives, each by the name of an attribute; an objective of another class that has
            this attribute gets the members of the base class that it lacks.
        implies: function of a `SelectedOptions` that returns additional options to choose, by config group.
        run_files: classes with `from_json` and `to_json` for the values in `DataSplits.kept`, by file name.
        plots: plots by file name without suffix.
        pictures: names or patterns of files in plots/ that the terminal points to.
        forward_methods: optional methods of models that run their blocks outside of `forward`, to register with FSDP2.
        evaluation: evaluation by `foundry.eval`.
        options: YAML files of a built-in task in conf/, by folder.
        config_dir: folder with the YAML files of a task of another package; None for a built-in task.
    """

    name: str
    schemas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    resolvers: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    builders: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)
    planned: Mapping[str, Planned] = field(default_factory=dict)
    objectives: Mapping[str, str] = field(default_factory=dict)
    implies: str | None = None
    run_files: Mapping[str, str] = field(default_factory=dict)
    plots: Mapping[str, Plot] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()
    forward_methods: tuple[str, ...] = ()
    evaluation: TaskEvaluation | None = None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    config_dir: Path | None = None


@cache
def installed_tasks() -> tuple[Task, ...]:
    """Return the installed tasks: the built-in ones in the order of their list, then other packages' tasks by name.

    Raises:
        ConfigError: a task of another package cannot be imported, is not a `Task`, or has the name of another task.
    """
    built_in = [resolve_name(path) for path in BUILT_IN.values() if find_spec(path.partition(":")[0]) is not None]
    tasks: dict[str, Task] = {task.name: task for task in built_in}
    for point in _entry_points():
        try:
            task = point.load()
        except Exception as error:
            raise _entry_point_error(point.name, f"{point.value} cannot be imported: {format_reason(error)}") from error
        if not isinstance(task, Task):
            raise _entry_point_error(point.name, f"{point.value} is not a foundry.core.tasks.Task")
        if task.name in tasks:
            raise _entry_point_error(
                point.name, f"{point.value} has the name {task.name}, which another task already has"
            )
        tasks[task.name] = task
    return tuple(tasks.values())


def _entry_points() -> "list[EntryPoint]":
    """Return the entry points for tasks; imports importlib.metadata, which is slow, only if a package declares any."""
    if not any(map(_declares_tasks, sys.path)):
        return []
    from importlib.metadata import entry_points

    return sorted({point.value: point for point in entry_points(group=ENTRY_POINTS)}.values(), key=lambda p: p.name)


def _declares_tasks(folder: str) -> bool:
    """Return whether a package in a folder of the import path declares entry points of tasks."""
    try:
        metadata_folders = [path for path in Path(folder).iterdir() if path.suffix in (".dist-info", ".egg-info")]
    except OSError:  # an archive, or no folder
        return False
    for path in metadata_folders:
        try:
            if f"[{ENTRY_POINTS}]" in (path / "entry_points.txt").read_text(encoding="utf-8"):
                return True
        except (OSError, UnicodeError):  # most packages have no entry points
            continue
    return False


def _entry_point_error(name: str, message: str) -> ConfigError:
    remedy = "fix its package or uninstall it"
    return ConfigError(Violation("task", f"entry point {name} of {ENTRY_POINTS}: {message}; {remedy}"))


def modules_of(group: str) -> list[ModuleType]:
    """Return the modules of all tasks with schemas of a group."""
    return [import_module(name) for task in installed_tasks() for name in task.schemas.get(group, ())]


def missing_task(target: str) -> str | None:
    """Return the built-in task that contains a `_target_` (its current name) and is not installed; None otherwise."""
    for name, path in BUILT_IN.items():
        module = path.partition(":")[0]
        if target.startswith(f"{module}.") and find_spec(module) is None:
            return name
    return None


@dataclass(frozen=True)
class SelectedOptions:
    """Options chosen so far, the argument of `Task.implies`.

    Attributes:
        hparams: option of `hparams` that the chosen method names; None if the method names no option.
        data: schema of the chosen data; None for data without a schema.
        is_implied: whether the option in `hparams` replaces the default option of the group `hparams`.
        is_free: returns whether the option of a group is a default or was chosen by an option of `hparams`.
    """

    hparams: str | None
    data: type[Any] | None
    is_implied: bool
    is_free: Callable[[str], bool]


def option_functions() -> list[Callable[[SelectedOptions], Mapping[str, str]]]:
    """Return `Task.implies` of all tasks that define it."""
    return [resolve_name(task.implies) for task in installed_tasks() if task.implies is not None]


def checks() -> Iterator[Any]:
    """Yield the checks of all tasks."""
    yield from (resolve_name(name) for task in installed_tasks() for name in task.checks)


def resolvers() -> dict[str, Any]:
    """Return the resolvers of all tasks, by name."""
    return {key: resolve_name(name) for task in installed_tasks() for key, name in task.resolvers.items()}


def pins() -> Iterator[Callable[[Any], list[Violation]]]:
    """Yield the functions of all tasks that replace values of a composed configuration."""
    yield from (resolve_name(name) for task in installed_tasks() for name in task.pins)


def builder_of(group: str) -> Callable[[Any], Any]:
    """Return the function that builds the part of a config group.

    Raises:
        ConfigError: no installed task builds parts of this group.
    """
    for task in installed_tasks():
        if group in task.builders:
            builder: Callable[[Any], Any] = resolve_name(task.builders[group])
            return builder
    raise ConfigError(Violation(group, f"is set but no installed task uses it; choose {group}=none"))


def forms() -> dict[str, Any]:
    """Return the functions of all tasks that build data from rows, by form."""
    return {form: resolve_name(name) for task in installed_tasks() for form, name in task.forms.items()}


def objective_bases(part: object) -> Iterator[type[Any]]:
    """Yield the base classes in `Task.objectives` of all tasks whose attribute the objective has, other than None."""
    for task in installed_tasks():
        for attribute, base in task.objectives.items():
            if getattr(part, attribute, None) is not None:
                yield resolve_name(base)


def planned() -> dict[str, Planned]:
    """Return the entries of plan.json of all tasks, by name."""
    return {name: entry for task in installed_tasks() for name, entry in task.planned.items()}


def run_files() -> dict[str, Any]:
    """Return the classes of `Task.run_files` of all tasks, by file name; this may import numpy."""
    return {file: resolve_name(name) for task in installed_tasks() for file, name in task.run_files.items()}


def plots() -> dict[str, Plot]:
    """Return the plots of all tasks, by stem."""
    return {stem: plot for task in installed_tasks() for stem, plot in task.plots.items()}


def evaluations() -> list[TaskEvaluation]:
    """Return the evaluations of all tasks that define one."""
    return [task.evaluation for task in installed_tasks() if task.evaluation is not None]
