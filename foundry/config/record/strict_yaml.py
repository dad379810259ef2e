"""Reader for YAML written by foundry or Hydra: limited in size, without tags, aliases or interpolation."""

from pathlib import Path
from typing import Any

import yaml

from foundry.config.composition.hydra_versions import yaml_loader
from foundry.run_dir.files import read_text

MAX_BYTES = 2**20
"""Largest size of a settings file that is read. foundry writes no larger settings files."""

_MAX_DEPTH = 32
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Safe loader, which constructs only plain values, lists and mappings, and parses numbers as OmegaConf does."""

    yaml_implicit_resolvers = yaml_loader().yaml_implicit_resolvers


def read_yaml(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the content of a YAML file from an untrusted source.

    Aliases, which can expand a file of a hundred bytes to gigabytes, and tags are refused. Interpolations remain text.

    Raises:
        ValueError: if the file is not valid YAML, or has content that foundry never writes. The message is one line
            that names the file.
        UnsafeFileError: if it is not a regular file, or is larger than `max_bytes`.
        OSError: if it is missing or cannot be read.
    """
    try:
        text = read_text(path, max_bytes=max_bytes)
        _check_plain(text)
        return yaml.load(text, Loader=_Loader)  # built on the safe loader
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {_where(error)}") from None
    except (ValueError, TypeError, RecursionError) as error:  # invalid UTF-8, invalid date, or a list as a key
        raise ValueError(f"{path} is not a settings file: {' '.join(str(error).split())}") from None


def _check_plain(text: str) -> None:
    """Check the parser's events before any object is constructed.

    Raises:
        ValueError: if there is an alias, an anchor, a tag, or too deep nesting.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(f"line {line} has an alias or anchor, which settings must not have")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(f"line {line} has the tag {tag!r}, which settings must not have")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"line {line} is nested deeper than {_MAX_DEPTH} levels")


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    line = "" if mark is None else f"line {mark.line + 1}: "
    return line + " ".join(str(problem).split())
