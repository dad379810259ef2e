"""Sources of data: one path or several, with weights for a mixture."""

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

from foundry.core.errors import ConfigError, Violation, as_text, counted

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9](?:[\w-]|\.(?=\d))*/)[A-Za-z0-9](?:[\w-]|\.(?=\d))*")
"""Pattern of `OWNER/NAME`. A dot must precede a digit, as in Qwen2.5; before letters it begins a file suffix."""


def listed_paths(value: object) -> list[str]:
    """Return the paths in a setting, which may be null, one path or a list of paths, as a list of strings."""
    if value is None:
        return []
    return [str(path) for path in value] if isinstance(value, (list, tuple)) else [str(value)]


def is_url(path: str) -> bool:
    """Return True if a path is an fsspec URL, which begins with the name of a file system."""
    return _URL.match(path) is not None


def local_path(key: str, text: str) -> Path:
    """Return the path of a file or folder on this machine, `~` expanded.

    URLs are refused before the conversion to a path, which would merge their two slashes into one.

    Args:
        key: setting or option that has the value, for messages.
        text: the value.

    Raises:
        ConfigError: if the value is a URL, or `~` names an unknown user.
    """
    if "://" in text:
        raise ConfigError(Violation(key, f"is {as_text(text)}, a URL; give a path on this machine"))
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(Violation(key, f"is {as_text(text)}: {error}")) from None


def why_no_url(path: str) -> str | None:
    """Return the reason why this machine cannot read a kind of URL; None if it can.

    Does not access the network, and does not import an installed package of the file system.
    """
    from fsspec.registry import get_filesystem_class, known_implementations  # type: ignore[import-untyped]

    kind = path.partition("://")[0]
    module = known_implementations.get(kind, {}).get("class", "").rpartition(".")[0]
    if module and find_spec(module.partition(".")[0]) is not None and not module.startswith("fsspec."):
        return None
    try:
        get_filesystem_class(kind)
    except (ImportError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def refuse_urls(data: object, run: object) -> None:
    """Refuse URLs in the settings of a run from an untrusted source, so that no server is contacted.

    Args:
        data: data settings of the run.
        run: run directory, for the message.

    Raises:
        ConfigError: if the data has a URL.
    """
    for name in getattr(data, "urls", ()):
        for path in filter(is_url, listed_paths(getattr(data, name))):
            message = (
                f"of {run} is {as_text(path)}, which would be downloaded; set trust=true if the run is yours, or give"
            )
            raise ConfigError(Violation(f"data.{name}", f"{message} data=... and its path"))


def hub_hint(path: str) -> str:
    """Return a hint if a missing path may be the name of a dataset on the Hugging Face hub, else an empty string."""
    return f"; for a dataset of the Hugging Face hub, write hf://datasets/{path}" if _is_hub_name(path) else ""


def download_hint(path: str, *, of_data: bool = False) -> str:
    """Return the download command if a missing path may be a name on the Hugging Face hub, else an empty string.

    Args:
        path: folder or file that does not exist, as typed.
        of_data: the name would be a dataset instead of a model.
    """
    if not _is_hub_name(path):
        return ""
    kind = " --repo-type dataset" if of_data else ""
    folder = path.rpartition("/")[2]
    return (
        f"; from the Hugging Face hub, download it with hf download {path}{kind} --local-dir {folder} and give {folder}"
    )


def _is_hub_name(path: str) -> bool:
    """Return True if a path may be a name on the Hugging Face hub: OWNER/NAME, and no local folder is named OWNER."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).parent.is_dir()


def check_sources(path: object, validation_path: object, weights: Sequence[float] | None) -> Iterator[Violation]:
    """Yield a violation for each of `data.path`, `data.validation_path` and `data.weights` that is invalid."""
    if path is None:
        yield Violation("data.path", "is null; give a file, folder or glob, or a list of them")
    for key, value in (("data.path", path), ("data.validation_path", validation_path)):
        if isinstance(value, dict) or (isinstance(value, list) and not _are_paths(value)):
            yield Violation(key, f"is {as_text(value)} but must be a path or a list of paths, such as [a.jsonl,b.txt]")
    if weights is None:
        return
    count = len(listed_paths(path))
    if invalid := [weight for weight in weights if not _is_share(weight)]:
        yield Violation(
            "data.weights",
            f"has {as_text(invalid[0])} but must have numbers above 0; to exclude a path, leave it out of data.path",
        )
    elif count < 2:
        yield Violation("data.weights", "has no effect without several paths; set data.path=[a.jsonl,b.txt]")
    elif len(weights) != count:
        yield Violation(
            "data.weights",
            f"has {counted(len(weights), 'number')} but data.path has {count} paths; give one number per path",
        )


def proportions(weights: Sequence[float]) -> list[Fraction]:
    """Return exact shares of the whole for weights written as decimals."""
    shares = [Fraction(str(weight)) for weight in weights]
    return [share / sum(shares) for share in shares]


def have_same_proportions(first: object, second: object) -> bool:
    """Return True if two values of `data.weights` have the same proportions, such as [7, 3] and [0.7, 0.3].

    Args:
        first: value from a configuration, possibly from an untrusted source.
        second: value to compare with, possibly from an untrusted source.
    """
    if not isinstance(first, list) or not isinstance(second, list) or not all(map(_is_share, [*first, *second])):
        return False
    return proportions(first) == proportions(second)


def _are_paths(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(value, (str, int)) and str(value).strip() for value in values)


def _is_share(weight: object) -> bool:
    return isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight < math.inf
