"""`foundry` and `python -m foundry`: a command by its name, or a run by its overrides."""

import difflib
import sys
from importlib import import_module
from pathlib import Path

from foundry.config.diagnostics.flags import find_word

COMMANDS = ("train", "plan", "lr_find", "eval", "sample", "export", "report", "diff", "sync", "new")
"""Modules of this package with a `main()`, in the order of the page of `--help`."""
_COMPLETION = "completion"
_COMPOSING = ("train", "plan", "lr_find", _COMPLETION)
"""Modules that compose runs and take the options of a project."""
_HELP = "help"
_LIKE_A_COMMAND = 0.7
"""Least likeness, as of difflib, of a misspelt command."""


def main(config_dir: Path | None = None, config_name: str | None = None) -> None:
    """The entry point of commands and runs, and of a project's own command.

    The first word without `=` is the name of a command, and all other words are its arguments. The default command is
    `train`.

    Args:
        config_dir: folder of the project's options, as with `--config-dir`; None: foundry's options alone.
        config_name: its primary configuration, as with `--config-name`; None: foundry's.
    """
    arguments = sys.argv[1:]
    name = _COMPLETION if _asks_for_words(arguments) else _take_command(arguments) or "train"
    if name in _COMPOSING:
        own = {"--config-dir": config_dir, "--config-name": config_name}
        arguments[:0] = [word for flag, value in own.items() if value is not None for word in (flag, str(value))]
    sys.argv[1:] = arguments
    import_module(f"foundry.commands.{name}").main()


def _asks_for_words(arguments: list[str]) -> bool:
    """Whether arguments are those of the function that completes words in a shell."""
    is_completion = not {"-sc", "--shell-completion"}.isdisjoint(arguments)
    return is_completion and any(word.startswith("query=") for word in arguments)


def _take_command(arguments: list[str]) -> str | None:
    """Remove the name of a command from the arguments and return it; None if they name none.

    `help NAME` becomes `--help` of that command.

    Args:
        arguments: after the name of the program.

    Raises:
        SystemExit: the name is misspelt; its line is printed.
    """
    place = find_word(arguments)
    if place is None:
        return None
    word = arguments[place]
    if word == _HELP:
        arguments[place] = "--help"
        return _take_command(arguments)
    if word in COMMANDS:
        del arguments[place]
        return word
    if near := difflib.get_close_matches(word.lower(), COMMANDS, n=1, cutoff=_LIKE_A_COMMAND):
        sys.stderr.write(f"{word}: is no command; did you mean {near[0]}? (commands: {', '.join(COMMANDS)})\n")
        sys.exit(2)
    return None
