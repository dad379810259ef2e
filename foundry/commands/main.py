"""`foundry` and `python -m foundry`: start a command by its name, or a run by its overrides."""

import difflib
import sys
from importlib import import_module
from pathlib import Path

from foundry.config.diagnostics.flags import find_word
from foundry.core.exit_codes import ExitCode

COMMANDS = (
    "train",
    "plan",
    "lr_find",
    "coordinates",
    "eval",
    "sample",
    "export",
    "report",
    "scaling",
    "diff",
    "sync",
    "new",
)
"""Modules of this package with a `main()`, in the order of the `--help` page."""
_COMPLETION = "completion"
_COMPOSING = ("train", "plan", "lr_find", "coordinates", _COMPLETION)
"""Commands that compose a run and accept the options of a project."""
_HELP = "help"
_LIKE_A_COMMAND = 0.7
"""Minimum difflib ratio between a misspelled command and its suggestion."""


def main(config_dir: Path | None = None, config_name: str | None = None) -> None:
    """Entry point of commands and runs, and of a project's own command.

    The first argument that is not an override, a flag or the value of a flag is the name of a command, which gets all
    other arguments. The default command is `train`.

    Args:
        config_dir: folder of the project's options, as with `--config-dir`; None uses only foundry's options.
        config_name: primary configuration of the project, as with `--config-name`; None uses foundry's.
    """
    arguments = sys.argv[1:]
    name = _COMPLETION if _asks_for_words(arguments) else _take_command(arguments) or "train"
    if name in _COMPOSING:
        project_flags = {"--config-dir": config_dir, "--config-name": config_name}
        arguments[:0] = [
            word for flag, value in project_flags.items() if value is not None for word in (flag, str(value))
        ]
    sys.argv[1:] = arguments
    import_module(f"foundry.commands.{name}").main()


def _asks_for_words(arguments: list[str]) -> bool:
    """Return whether the arguments come from a shell's completion function, which asks for candidates."""
    is_completion = not {"-sc", "--shell-completion"}.isdisjoint(arguments)
    return is_completion and any(word.startswith("query=") for word in arguments)


def _take_command(arguments: list[str]) -> str | None:
    """Remove the name of a command from the arguments and return it; None if no argument is one.

    `help NAME` becomes `--help` of that command.

    Args:
        arguments: arguments after the program name.

    Raises:
        SystemExit: the name is misspelled; a suggestion has been printed.
    """
    index = find_word(arguments)
    if index is None:
        return None
    word = arguments[index]
    if word == _HELP:
        arguments[index] = "--help"
        return _take_command(arguments)
    if word in COMMANDS:
        del arguments[index]
        return word
    if matches := difflib.get_close_matches(word.lower(), COMMANDS, n=1, cutoff=_LIKE_A_COMMAND):
        sys.stderr.write(f"{word}: unknown command; did you mean {matches[0]}? (commands: {', '.join(COMMANDS)})\n")
        sys.exit(ExitCode.REFUSED)
    return None
