"""Refusal of flags in the style of other programs, such as `--lr 3e-4`, with the override to type instead."""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundry.config.composition.start_dir import check_start_dir
from foundry.core.errors import ConfigError, Violation, shown

HYDRA_FLAGS = {
    "--help": 0,
    "-h": 0,
    "--hydra-help": 0,
    "--version": 0,
    "--cfg": 1,
    "-c": 1,
    "--resolve": 0,
    "--package": 1,
    "-p": 1,
    "--run": 0,
    "-r": 0,
    "--multirun": 0,
    "-m": 0,
    "--shell-completion": 0,
    "-sc": 0,
    "--config-path": 1,
    "-cp": 1,
    "--config-name": 1,
    "-cn": 1,
    "--config-dir": 1,
    "-cd": 1,
    "--experimental-rerun": 1,
    "--info": 0,
    "-i": 0,
}
"""Flags of Hydra's command line, with the number of values that follow; the value of `--info` is optional."""

JSON = "--json"
"""Flag of commands that print facts as JSON."""

_FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd")
_OPTIONAL_VALUE = ("--info", "-i")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of `--info`; the first is the default."""

_FILES = ("config", "config_file", "config_path", "config_name", "cfg_path", "yaml", "yaml_file")
_ASSIGNMENT = re.compile(r"[~+]{0,2}[\w./@:-]+=")
_NUMBER = re.compile(r"-\.?\d")
_SHORTEST_ABBREVIATION = len("--cfg")


@dataclass(frozen=True)
class Flag:
    """An argument that begins with a dash and is unknown to Hydra.

    Attributes:
        text: flag and value as typed.
        key: name without dashes, in the form of a setting.
        value: value as typed; true for a flag without a value, false for `--no-key`.
    """

    text: str
    key: str
    value: str


def find_word(arguments: Sequence[str]) -> int | None:
    """Return the index of the first argument that is not an override, a flag or the value of a flag; None without one.

    Args:
        arguments: arguments after the program name.
    """
    remaining, flags = deque(enumerate(arguments)), {**HYDRA_FLAGS, JSON: 0}
    while remaining:
        index, word = remaining.popleft()
        name, equals, _ = word.partition("=")
        if not _is_flag(word):
            if not equals and not word.startswith(("-", "+", "~")):
                return index
        elif equals:
            continue
        elif (flag := _hydra_flag(name, flags)) is None:  # the arguments after it are its values
            while remaining and not _is_flag(remaining[0][1]) and not _ASSIGNMENT.match(remaining[0][1]):
                remaining.popleft()
        elif remaining and (flags[flag] or (flag in _OPTIONAL_VALUE and remaining[0][1] in _INFO)):
            remaining.popleft()
    return None


def split_flags(arguments: Sequence[str], known_flags: Collection[str] = ()) -> tuple[list[Flag], list[str]]:
    """Split arguments into flags and other arguments.

    Args:
        arguments: arguments after the command's name.
        known_flags: flags of `HYDRA_FLAGS` to keep among the other arguments, with their values.
    """
    flags, other_arguments = list[Flag](), list[str]()
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if not _is_flag(word):
            other_arguments.append(word)
        elif (flag := _hydra_flag(name, known_flags)) is not None:
            other_arguments.append(word)
            if HYDRA_FLAGS[flag] and not equals and remaining:
                other_arguments.append(remaining.pop(0))
        else:
            values = [value] if equals else []
            while not equals and remaining and not _is_flag(remaining[0]) and not _ASSIGNMENT.match(remaining[0]):
                values.append(remaining.pop(0))
            text = word if equals else " ".join([word, *values])
            flags.append(_flag(text, name.lstrip("-"), values))
    return flags, other_arguments


def check_flags(arguments: Sequence[str], options: Collection[str] = ()) -> None:
    """Refuse flags that are not Hydra's.

    Args:
        arguments: arguments after the command's name.
        options: keys of the command's own options.

    Raises:
        ConfigError: has a line for each flag, with the override to type instead.
    """
    flags, _ = split_flags(arguments, HYDRA_FLAGS)
    if flags:
        raise ConfigError(refuse(flag, lambda key: _setting(key, options)) for flag in flags)


def plain_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides of a run among arguments with invalid flags.

    Return none if they may have another meaning than in a run with foundry's own options: in a sweep, or with a config
    file or folder of the user.
    """
    flags, arguments_left = split_flags(arguments, HYDRA_FLAGS)
    if any(flag.key in _FILES for flag in flags) or any(map(_is_flag, arguments_left)):
        return []
    return [word for word in arguments_left if not re.match(r"[~+]*hydra[./]", word)]


def refuse(flag: Flag, find_key: Callable[[str], str | None]) -> Violation:
    """Return the error for a flag.

    Args:
        flag: the flag as typed.
        find_key: returns the full key for a name, or None for an unknown name.
    """
    from foundry.config.composition.store import GROUPS
    from foundry.config.diagnostics.elsewhere import own_options  # the table is needed for errors only
    from foundry.config.diagnostics.names import did_you_mean, meanings

    if (key := find_key(flag.key)) is not None:
        return Violation(flag.text, f"is not a valid argument; write {_assignment(key, flag.value)}")
    if flag.key in _FILES:
        path = Path(flag.value)
        folder = f"--config-dir {path.parent} --config-name {path.stem}"
        return Violation(flag.text, f"is not a valid argument; write {folder}")
    hint = did_you_mean(flag.key, meanings(), GROUPS, value=flag.value, options=own_options)
    return Violation(flag.text, f"is not a valid argument{hint or '; give settings as key=value'}")


def arrange_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in the form that Hydra accepts.

    Flags come first, since argparse does not accept flags between overrides. A relative `--config-path` is resolved
    against the current folder, whereas Hydra resolves it against a file of foundry.

    Args:
        arguments: arguments after the command's name; `check_flags` has accepted their flags.

    Raises:
        ConfigError: the current folder, or a folder of options, does not exist.
    """
    flags, overrides, remaining = list[str](), list[str](), list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        flag = _hydra_flag(name, HYDRA_FLAGS) if _is_flag(word) else None
        if flag is None:
            overrides.append(word)
        elif flag in _OPTIONAL_VALUE and not equals:
            flags.append(f"{flag}={remaining.pop(0) if remaining and remaining[0] in _INFO else _INFO[0]}")
        elif not HYDRA_FLAGS[flag]:
            flags.append(word)
        elif equals or remaining:
            value = value if equals else remaining.pop(0)
            flags += [flag, _existing_folder(flag, value) if flag in _FOLDERS else value]
        else:
            flags.append(word)  # argparse reports the missing value
    return flags + overrides


def _existing_folder(flag: str, path: str) -> str:
    if "://" in path:
        return path
    check_start_dir()
    if not Path(path).is_dir():
        raise ConfigError(
            [Violation(flag, f"is {shown(path)}, which is not an existing folder; give the folder with your options")]
        )
    return str(Path(path).absolute()) if flag in ("--config-path", "-cp") else path


def _flag(text: str, name: str, values: Sequence[str]) -> Flag:
    key = name.replace("-", "_")
    if not values and (negation := re.fullmatch(r"no_(\w.*)", key)) and key not in ("no_cuda",):
        return Flag(text, negation[1], "false")
    return Flag(text, key, f"[{','.join(values)}]" if len(values) > 1 else values[0] if values else "true")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--") and not _NUMBER.match(word)


def _hydra_flag(name: str, known_flags: Collection[str]) -> str | None:
    """Return the flag of Hydra that an argument is or abbreviates; a short flag's value may follow without a space."""
    if name in known_flags:
        return name
    if name.startswith("--"):
        matches = [flag for flag in known_flags if flag.startswith(name)]
        return matches[0] if len(matches) == 1 and len(name) >= _SHORTEST_ABBREVIATION else None
    return "-m" if "-m" in known_flags and re.fullmatch(r"-c(job|hydra|all)", name) else None


def _setting(key: str, options: Collection[str]) -> str | None:
    """Return the key if it is a setting or group of foundry without any change; otherwise None."""
    from foundry.config.composition.store import GROUPS
    from foundry.config.diagnostics.names import meanings

    is_own = key in options or key in GROUPS or key in meanings() or key.startswith("hydra.")
    return key if is_own else None


def _assignment(key: str, value: str) -> str:
    from foundry.config.diagnostics.elsewhere import quoted

    return quoted(f"{key}={value}")
