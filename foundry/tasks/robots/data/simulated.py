"""Identity of a simulator: the settings, package versions and source code that determine the data generated with it."""

import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from foundry.config.target_names import respelled
from foundry.core.part_names import original_path

_PACKAGES = ("numpy", "mujoco", "gymnasium", "gymnasium-robotics", "metaworld")
"""Packages whose version may change the behavior or rendering of a simulator."""
_OWN = "foundry.tasks.robots.simulators."
_OWN_SOURCES = "36c3b6776905e2c5d4debd6eb9250d048eaf9ac4455f6e49bce923a134631ba8"
"""Version of the built-in simulators: the hash of their files at foundry 0.1.

With a new version, runs generate their data again, and are different runs. So change this hash only if a simulator
acts or renders differently.
"""


def simulator_identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a simulator with the versions and source code that determine its behavior."""
    return {
        "simulator": respelled(dict(settings), original_path),
        "versions": {name: _version(name) for name in _PACKAGES},
        "sources": _sources(str(settings.get("_target_", ""))),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sources(target: str) -> str:
    """Return the version of the built-in simulators, or a hash of another simulator's module; empty without a file.

    If that module is in a package, the hash includes the other modules in the same folder.
    """
    part = None
    with suppress(ImportError, AttributeError, ValueError):  # reported when the simulator is built
        part = resolve_name(target)
    module = sys.modules.get(getattr(part, "__module__", ""))
    if module is None or getattr(module, "__file__", None) is None:
        return ""
    if module.__name__.startswith(_OWN):
        return _OWN_SOURCES
    file = Path(str(module.__file__))
    files = sorted(file.parent.glob("*.py")) if module.__package__ else [file]
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in files)).hexdigest()
