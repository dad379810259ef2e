"""`foundry -sc query=SHELL`: print candidates for tab completion: commands, their options, and overrides of a run.

Hydra's functions for bash, zsh and fish, which `foundry -sc install=SHELL` prints, run this command with the line in
COMP_LINE.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from enum import Enum
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_type_hints

from foundry.commands.composed_command import split_options
from foundry.config.diagnostics.flags import HYDRA_FLAGS, JSON, find_word

OPTIONS = {
    "train": None,
    "plan": "PlanOptions",
    "lr_find": "FindOptions",
    "coordinates": "CoordinatesOptions",
    "eval": "EvalOptions",
    "sample": "SampleOptions",
    "export": "ExportOptions",
    "report": "ReportOptions",
    "scaling": "ScalingOptions",
    "diff": "DiffOptions",
    "sync": "SyncOptions",
    "new": "NewOptions",
}
"""Commands, each with the name of the options class in its module; None if it has only the options of a run."""
_FLAGS = ("--help", "--version", JSON)
_WHICH = ("last", "best")
_HIDDEN = ("schema/", "local")
"""Prefixes of foundry's config groups that users do not set."""


def main() -> None:
    """Print the candidates for the end of the line, in the format of the shell."""
    shell = next(word.partition("=")[2] for word in sys.argv if word.startswith("query="))
    candidates = sorted(set(complete(os.environ.get("COMP_LINE", ""))))
    sys.stdout.write(("\n" if shell == "fish" else " ").join(candidates) + "\n")


def complete(line: str) -> Iterator[str]:
    """Yield the candidates for the end of a line of `foundry`.

    Args:
        line: text from the program name to the cursor.
    """
    words = line.split()[1:]
    last = "" if line.endswith(" ") or not words else words.pop()
    index = find_word(words)
    name = None if index is None else words.pop(index)
    if last.startswith("-"):
        yield from _with_prefix(last, _FLAGS if name else HYDRA_FLAGS)
    elif name is None:
        yield from _with_prefix(last, OPTIONS)
        yield from _complete_overrides(words, last)
    elif name in OPTIONS:
        yield from _complete_command(name, words, last)


def _with_prefix(last: str, words: Iterable[str]) -> Iterator[str]:
    return (word for word in words if word.startswith(last))


def _complete_command(name: str, words: list[str], last: str) -> Iterator[str]:
    """Yield the candidates for a command: its own options, and the overrides that it accepts."""
    module, schema = import_module(f"foundry.commands.{name}"), OPTIONS[name]
    if name == "eval":
        options, groups = module.options_for(words)
        yield from _complete_options(options, last)
        yield from _with_prefix(last, ["tasks="])
        overrides = [word for word in words if module.group_of(word) in groups]
        yield from (word for word in _complete_overrides(overrides, last) if module.group_of(word) in groups)
    elif schema is None:
        yield from _complete_overrides(words, last)
    elif hasattr(module, "run_composed"):
        options, prefix = getattr(module, schema), f"{name}."
        yield from _complete_options(options, last.removeprefix(prefix), prefix if last.startswith(prefix) else "")
        yield from _complete_overrides(split_options(options, prefix, words)[1], last)
    else:
        yield from _complete_options(getattr(module, schema), last)


def _complete_options(schema: type[Any], last: str, prefix: str = "") -> Iterator[str]:
    """Yield the names of options that complete `last`, or after `=` the values of the option."""
    key, equals, value = last.partition("=")
    hints = get_type_hints(schema)
    if not equals:
        yield from (f"{prefix}{name}=" for name in _with_prefix(key, hints))
    elif key in hints:
        yield from (f"{prefix}{key}={candidate}" for candidate in _with_prefix(value, _values(key, hints[key], value)))


def _values(key: str, hint: Any, value: str) -> list[str]:
    """Return candidate values: true and false, members of an enumeration, last and best for `which`, files for text."""
    kinds = get_args(hint) or (hint,)
    if bool in kinds:
        return ["true", "false"]
    enumerations = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if enumerations:
        return [member.name for kind in enumerations for member in kind]
    if key.endswith("which"):
        return list(_WHICH)
    if str not in kinds:
        return []
    folder = Path(value if value.endswith("/") else os.path.dirname(value))  # noqa: PTH120 (`a/.` stays)
    start = value[: value.rfind("/") + 1]
    with suppress(OSError):
        return [f"{start}{path.name}{'/' if path.is_dir() else ''}" for path in folder.iterdir()]
    return []


def _complete_overrides(words: Sequence[str], last: str) -> list[str]:
    """Return the overrides of a run that Hydra suggests."""
    from foundry.commands.train import main as train

    arguments, os.environ["COMP_LINE"] = sys.argv[1:], " ".join(["foundry", *words, last])
    sys.argv[1:] = [word for word in arguments if not word.startswith("query=")] + ["query=bash"]
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()), suppress(SystemExit):
        train()
    sys.argv[1:] = arguments
    return [word for word in output.getvalue().split() if not word.startswith(_HIDDEN)]
