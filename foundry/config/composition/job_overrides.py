"""The overrides that a job was given: keys, values, and the short names they are shown by."""

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
_MOST_BYTES = 2**16  # of a job's overrides: reading more takes seconds


_PART = re.compile(r"(?<![\w.])foundry(\.\w+)+")
"""A dotted path that may be of one of foundry's own parts."""


def respell_targets(override: str, spell: Callable[[str], str]) -> str:
    """Return an override with `spell` applied to dotted paths of foundry if it sets a `_target_`."""
    return _PART.sub(lambda found: spell(found[0]), override) if "_target_" in override else override


def key_and_value(override: str) -> tuple[str, str]:
    """`+group.key=value` as `group.key` and `value`; foundry's parts by their public names."""
    key, _, value = respell_targets(override, public_name).partition("=")
    return key.lstrip("+"), value


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two end in the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counted = Counter(last.values())
    return {key: name if counted[name] == 1 else key for key, name in last.items()}


def parse_number(value: str) -> float:
    """The number that a value is; NaN for any other."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def brief(value: str) -> str:
    """A value as it is shown: of a number with many digits, as a search proposes it, the first four that count."""
    number = parse_number(value)
    return value if math.isnan(number) or len(value) <= _LONGEST_NUMBER else f"{number:.4g}"


def format_command(overrides: Sequence[str], sweep_command: Sequence[str]) -> str:
    """The command that runs a job by itself, for a shell.

    Args:
        overrides: the job's.
        sweep_command: those that its sweep was started with; empty where they are not known.
    """
    is_sweep_by_flag = not sweep_command or {"-m", "--multirun"} & set(sweep_command)
    # An option makes it a sweep, too.
    is_sweep_by_option = not is_sweep_by_flag or any(override.startswith("hparams_search=") for override in overrides)
    mode = ("hydra.mode=RUN",) if is_sweep_by_option else ()
    return shlex.join(["python", "-m", "foundry", *_config_flags(sweep_command), *overrides, *mode])


def _config_flags(command: Sequence[str]) -> list[str]:
    """The flags that say where the user's own options are, and which configuration is the primary one."""
    flags = list[str]()
    for flag, value in itertools.pairwise([*command, ""]):
        if flag in _CONFIG_FLAGS:
            flags += [flag, value]
        elif flag.startswith("--") and flag.partition("=")[0] in _CONFIG_FLAGS:
            flags.append(flag)
    return flags


def recorded_overrides(run_dir: Path) -> tuple[str, ...]:
    """All overrides of a job, as Hydra wrote them into its run directory; none where it did not."""
    try:
        overrides = read_yaml(run_dir / HYDRA / "overrides.yaml", max_bytes=_MOST_BYTES)
    except (OSError, ValueError):
        return ()
    given = overrides if isinstance(overrides, list) else []
    return tuple(one_line(override) for override in given if isinstance(override, str))
