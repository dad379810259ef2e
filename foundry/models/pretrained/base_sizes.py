"""Limits on the sizes in a transformers config, checked before transformers builds a model of that size."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from foundry.core.errors import ConfigError, Violation, as_text
from foundry.run_dir.files import in_hub_cache
from foundry.run_dir.strict_json import DamagedFileError, read_object

_BOUNDS = (
    (re.compile(r"(?:layers?|blocks?|depths?)$"), 1000),
    (re.compile(r"(?:positions|position_embeddings|n_ctx|context_length|seq_len\w*)$"), 2**24),
    (re.compile(r"(?:size|dim|width|embd|inner|model|ff|heads?|experts|groups)$"), 10**8),
)
"""Patterns of field names in a config.json, each with an upper bound beyond all known models."""
_MAX_MODULES = 2**18
"""Upper bound of the modules of a model. For comparison, 61 layers of 384 experts of 4 modules are 94,000 modules."""


def check_sizes(folder: Path) -> None:
    """Raise a ConfigError if config.json asks for more or larger layers than any machine can build.

    Args:
        folder: model folder of transformers, with a config.json.

    Raises:
        ConfigError: config.json is not a JSON object, or a size in it is out of bounds.
    """
    try:
        settings = read_object(in_hub_cache(folder / "config.json"))
        too_large = dict(_out_of_bounds(settings))
    except (DamagedFileError, OSError, RecursionError) as error:
        raise ConfigError(Violation("model.path", f"{str(folder)!r}: {error}")) from None
    if too_large:
        texts = (f"{name}={as_text(value)} is above {bound}" for name, (value, bound) in too_large.items())
        message = f"{str(folder)!r}: config.json has sizes that are too large: {', '.join(texts)}"
        raise ConfigError(Violation("model.path", f"{message}; correct that file, or choose another folder"))


def check_own_sizes(fields: Mapping[str, Any]) -> None:
    """Raise a ConfigError for sizes out of bounds in the `model.config` of a composed or recorded configuration.

    Raises:
        ConfigError: a size is out of bounds.
    """
    if too_large := dict(_out_of_bounds(dict(fields))):
        raise ConfigError(
            Violation(f"model.config.{name}", f"is {as_text(value)} but must be at most {bound}")
            for name, (value, bound) in too_large.items()
        )


@contextmanager
def bounded_modules() -> Iterator[None]:
    """Limit the number of modules built inside the context, for sizes that no pattern in `_BOUNDS` covers.

    Raises:
        ConfigError: more than 2**18 modules have been registered inside the context.
    """
    count = 0

    def note(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MAX_MODULES:
            message = f"has more than {_MAX_MODULES} modules; reduce its number of layers or experts"
            raise ConfigError(Violation("model", message))

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _out_of_bounds(value: Any, name: str = "") -> Iterator[tuple[str, tuple[float, int]]]:
    """Yield the names of settings above their bounds, each with value and bound; nested objects are searched too."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _out_of_bounds(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _out_of_bounds(item, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        bound = next((bound for pattern, bound in _BOUNDS if pattern.search(name)), None)
        if bound is not None and value > bound:
            yield name, (value, bound)
