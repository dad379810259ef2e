"""`foundry new DIR`: create your own project, with a model, a dataset, options and a test that run."""

import keyword
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from foundry.config.command import Outcome, check_output_folder, command, folder_option, quoted
from foundry.config.packages import INSTALL_PROJECT
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.redact import printable

_TEMPLATE = Path(__file__).resolve().parent / "project_template"
_SUFFIX, _PLACEHOLDER = ".template", "my_project"
_OWN_FOLDERS = ("conf", "tests", "runs", "multirun")
"""Names of a project's folders, which its package cannot use."""


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Options of the command: folder and name of the project."""

    dir: str = setting("???", "folder of the project, new or empty; short form: `python -m foundry.new DIR`")
    name: str | None = setting(None, "name of the Python package; null: the name of the folder")


def new(options: NewOptions) -> Path:
    """Write a new project.

    Returns:
        The folder of the project.

    Raises:
        ConfigError: the folder is not empty, or the name is not a valid package name.
    """
    folder = folder_option("dir", options.dir).absolute()
    check_output_folder("dir", folder)
    name = _resolve_name(folder, options.name)
    files = [path for path in sorted(_TEMPLATE.rglob(f"*{_SUFFIX}")) if path.is_file()]
    for path in files:
        destination = folder / _destination(path, name)
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_text(path.read_text(encoding="utf-8").replace(_PLACEHOLDER, name), encoding="utf-8")
    sys.stdout.write(printable(_next_steps(folder, name)))
    return folder


def _resolve_name(folder: Path, name: str | None) -> str:
    """Return the name of the package.

    Raises:
        ConfigError: the name is not a valid package name, or a project folder or module already has it.
    """
    key = "dir" if name is None else "name"
    remedy = "choose another, such as name=my_project"
    package = re.sub(r"[\W_]+", "_", folder.name.lower(), flags=re.ASCII).strip("_") if name is None else name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package) or keyword.iskeyword(package):
        text = folder.name if name is None else name
        message = f"is {text}, which is not a valid package name (a-z, 0-9 and _); {remedy}"
        raise ConfigError(Violation(key, message))
    if package in _OWN_FOLDERS or find_spec(package) is not None:
        reason = "a folder of the project" if package in _OWN_FOLDERS else "an installed module"
        raise ConfigError(Violation(key, f"gives the package the name {package}, the name of {reason}; {remedy}"))
    return package


def _destination(template: Path, name: str) -> Path:
    """Return the path of a file within the project; template names have no leading dot."""
    path = template.relative_to(_TEMPLATE).with_suffix("")
    path = Path(*(part.replace(_PLACEHOLDER, name) for part in path.parts))
    return Path(".gitignore") if path.name == "gitignore" else path


def _next_steps(folder: Path, name: str) -> str:
    commands = (f"cd {shlex.quote(str(folder))}", INSTALL_PROJECT, "pytest", f"python -m {name}")
    return "\n".join([f"project {name} in {folder}", "", *(f"    {command}" for command in commands), ""])


def main() -> None:
    """Entry point of the command."""
    words = sys.argv[1:]
    indices = [index for index, word in enumerate(words) if "=" not in word and not word.startswith("-")]
    if len(indices) == 1:
        words[indices[0]] = f"dir={quoted(words[indices[0]])}"
        sys.argv[1:] = words
    command(
        NewOptions,
        lambda options: Outcome({"dir": str(new(options))}),
        name="foundry.new",
        doc=__doc__.split(": ", 1)[1],
    )
