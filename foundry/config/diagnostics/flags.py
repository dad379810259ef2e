"""Refusal of flags in the style of other programs, such as `--lr 3e-4`, with the override to type instead."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundry.config.composition.hydra_versions import since_1_4
from foundry.config.composition.start_dir import check_start_dir
from foundry.core.errors import ConfigError, Violation, as_text, nearest

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
"""Flag that makes a command print its result as JSON."""

_FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd")
_OPTIONAL_VALUE = ("--info", "-i")
_INFO = ("all", *since_1_4("aliases"), "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of `--info`; the first is the default."""

_FILES = ("config", "config_file", "config_path", "config_name", "cfg_path", "yaml", "yaml_file")
_ASSIGNMENT = re.compile(r"[~+]{0,2}[\w./@:-]+=")
_NUMBER = re.compile(r"-\.?\d")
_SHORTEST_ABBREVIATION = len("--cfg")


@dataclass(frozen=True)
class Flag:
    """An argument that begins with a dash and is not a known flag, with its value.

    Attributes:
        text: flag and value as typed.
        key: name without dashes, in the form of a setting.
        value: value as typed; true for a flag without a value, false for `--no-key`.
    """

    text: str
    key: str
    value: str


def find_word(arguments: Sequence[str]) -> int | None:
    """Return the index of the first argument apart from overrides, flags and their values, or None.

    Args:
        arguments: arguments after the program name.
    """
    for index, word, _, _ in _read(arguments, {**HYDRA_FLAGS, JSON: 0}):
        if "=" not in word and not word.startswith(("-", "+", "~")):
            return index
    return None


def _read(arguments: Sequence[str], known_flags: Mapping[str, int]) -> Iterator[tuple[int, str, str | None, list[str]]]:
    """Yield index and text of each override and flag; for a flag, its name in `known_flags` and its value's arguments.

    Overrides and unknown flags have the name None. The values of an unknown flag are all arguments up to the next flag
    or override.
    """
    remaining = deque(enumerate(arguments))
    while remaining:
        index, word = remaining.popleft()
        name, equals, _ = word.partition("=")
        flag, values = (_hydra_flag(name, known_flags) if _is_flag(word) else None), list[str]()
        if flag is not None:
            takes_next = known_flags[flag] or (flag in _OPTIONAL_VALUE and remaining and remaining[0][1] in _INFO)
            values += [remaining.popleft()[1]] if takes_next and remaining and not equals else []
        elif _is_flag(word):
            while remaining and not equals and not _is_flag(remaining[0][1]) and not _ASSIGNMENT.match(remaining[0][1]):
                values.append(remaining.popleft()[1])
        yield index, word, flag, values


def split_flags(arguments: Sequence[str], known_flags: Mapping[str, int]) -> tuple[list[Flag], list[str]]:
    """Split arguments into unknown flags and other arguments.

    Args:
        arguments: arguments after the command's name.
        known_flags: flags to keep among the other arguments, each with its number of values, as in `HYDRA_FLAGS`.
    """
    flags, other_arguments = list[Flag](), list[str]()
    for _, word, flag, values in _read(arguments, known_flags):
        if flag is not None or not _is_flag(word):
            other_arguments += [word, *values]
        else:
            name, equals, value = word.partition("=")
            flags.append(_flag(" ".join([word, *values]), name.lstrip("-"), [value] if equals else values))
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

    The result is empty if there is also a flag of Hydra or of a config file, such as `-m` or `--config-dir`: overrides
    may then have another meaning than in a run with foundry's own options.
    """
    flags, other_arguments = split_flags(arguments, HYDRA_FLAGS)
    if any(flag.key in _FILES for flag in flags) or any(map(_is_flag, other_arguments)):
        return []
    return [word for word in other_arguments if not re.match(r"[~+]*hydra[./]", word)]


def refuse(flag: Flag, find_key: Callable[[str], str | None]) -> Violation:
    """Return the error for a flag.

    Args:
        flag: the flag as typed.
        find_key: returns the full key for a name, or None for an unknown name.
    """
    from foundry.config.composition.store import GROUPS
    from foundry.config.diagnostics.names import did_you_mean, meanings
    from foundry.config.diagnostics.other_frameworks import own_options  # names.csv is needed for errors only

    if (key := find_key(flag.key)) is not None:
        return Violation(flag.text, f"is not a valid argument; write {_assignment(key, flag.value)}")
    if flag.key in _FILES:
        path = Path(flag.value)
        folder = f"--config-dir {path.parent} --config-name {path.stem}"
        return Violation(flag.text, f"is not a valid argument; write {folder}")
    hint = did_you_mean(flag.key, meanings(), GROUPS, value=flag.value, options=own_options)
    hint = hint or nearest(flag.text.partition("=")[0].split()[0], [name for name in HYDRA_FLAGS if name[:2] == "--"])
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
    flags, overrides = list[str](), list[str]()
    for _, word, flag, values in _read(arguments, HYDRA_FLAGS):
        _, equals, value = word.partition("=")
        if flag is None:
            overrides += [word, *values]
        elif flag in _OPTIONAL_VALUE and not equals:
            flags.append(f"{flag}={values[0] if values else _INFO[0]}")
        elif flag in _FOLDERS and (equals or values):
            flags += [flag, _existing_folder(flag, value if equals else values[0])]
        else:
            flags += [flag, value] if equals and HYDRA_FLAGS[flag] else [word, *values]
    return flags + overrides


def _existing_folder(flag: str, path: str) -> str:
    if "://" in path:
        return path
    check_start_dir()
    if not Path(path).is_dir():
        raise ConfigError(
            [Violation(flag, f"is {as_text(path)}, which is not an existing folder; give the folder with your options")]
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
    """Return the flag of Hydra that an argument is or abbreviates; `-cjob` counts as `-m`: both take no value."""
    if name in known_flags:
        return name
    if name.startswith("--"):
        matches = [flag for flag in known_flags if flag.startswith(name)]
        return matches[0] if len(matches) == 1 and len(name) >= _SHORTEST_ABBREVIATION else None
    return "-m" if "-m" in known_flags and re.fullmatch(r"-c(job|hydra|all)", name) else None


def _setting(key: str, options: Collection[str]) -> str | None:
    """Return the key if it is exactly one of `options`, a setting or group of foundry, or `hydra.*`; otherwise None."""
    from foundry.config.composition.store import GROUPS
    from foundry.config.diagnostics.names import meanings

    is_own = key in options or key in GROUPS or key in meanings() or key.startswith("hydra.")
    return key if is_own else None


def _assignment(key: str, value: str) -> str:
    from foundry.config.diagnostics.other_frameworks import quoted

    return quoted(f"{key}={value}")
