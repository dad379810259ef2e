"""Overrides of a job: keys, values, and short display names."""

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from foundry.config.record.strict_yaml import read_yaml
from foundry.core.part_names import public_name
from foundry.run_dir.names import HYDRA
from foundry.run_dir.redact import one_line

_CONFIG_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_LONGEST_NUMBER = 8  # characters
_MOST_BYTES = 2**16  # of a job's overrides file; parsing more takes seconds


_PART = re.compile(r"(?<![\w.])foundry(\.\w+)+")
"""Dotted path that may refer to a built-in part."""


def respell_targets(override: str, spell: Callable[[str], str]) -> str:
    """Return an override, with `spell` applied to each dotted path of foundry if the override contains `_target_`."""
    return _PART.sub(lambda match: spell(match[0]), override) if "_target_" in override else override


def key_and_value(override: str) -> tuple[str, str]:
    """Split `+group.key=value` into `group.key` and `value`, with built-in parts under their public names."""
    key, _, value = respell_targets(override, public_name).partition("=")
    return key.lstrip("+"), value


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Map each key to its last part, or to the whole key if several keys end in the same part."""
    last_parts = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last_parts.values())
    return {key: name if counts[name] == 1 else key for key, name in last_parts.items()}


def parse_number(value: str) -> float:
    """Parse a value as a number. Return NaN if it is not a number."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def brief(value: str) -> str:
    """Return a value for display. Long numbers, as a search proposes them, are rounded to four significant digits."""
    number = parse_number(value)
    return value if math.isnan(number) or len(value) <= _LONGEST_NUMBER else f"{number:.4g}"


def format_command(overrides: Sequence[str], sweep_command: Sequence[str]) -> str:
    """Return the shell command that runs a job on its own.

    Args:
        overrides: the overrides of the job.
        sweep_command: the command-line arguments that started the sweep of the job; empty if unknown.
    """
    is_sweep_by_flag = not sweep_command or {"-m", "--multirun"} & set(sweep_command)
    # An option of `hparams_search` starts a sweep without the flag -m.
    is_sweep_by_option = not is_sweep_by_flag or any(override.startswith("hparams_search=") for override in overrides)
    mode = ("hydra.mode=RUN",) if is_sweep_by_option else ()
    return shlex.join(["python", "-m", "foundry", *_config_flags(sweep_command), *overrides, *mode])


def _config_flags(command: Sequence[str]) -> list[str]:
    """Return the flags of a command that select the user's own option folders and the primary configuration."""
    flags = list[str]()
    for flag, value in itertools.pairwise([*command, ""]):
        if flag in _CONFIG_FLAGS:
            flags += [flag, value]
        elif flag.startswith("--") and flag.partition("=")[0] in _CONFIG_FLAGS:
            flags.append(flag)
    return flags


def recorded_overrides(run_dir: Path) -> tuple[str, ...]:
    """Return the overrides that Hydra wrote into a job's run directory; empty if their file is missing or invalid."""
    try:
        overrides = read_yaml(run_dir / HYDRA / "overrides.yaml", max_bytes=_MOST_BYTES)
    except (OSError, ValueError):
        return ()
    lines = overrides if isinstance(overrides, list) else []
    return tuple(one_line(override) for override in lines if isinstance(override, str))
