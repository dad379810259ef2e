"""What is made by a simulator and kept: what it depends on besides its own settings."""

import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from foundry.config.target_names import respelled
from foundry.core.part_names import first_path

_PACKAGES = ("numpy", "mujoco", "gymnasium", "gymnasium-robotics", "metaworld")
"""Whose version may change what a simulator does, or what is drawn."""
_OWN = "foundry.tasks.robots.simulators."
_OWN_SOURCES = "36c3b6776905e2c5d4debd6eb9250d048eaf9ac4455f6e49bce923a134631ba8"
"""Version of foundry's own simulators: the hash of their files at 0.1. For another version their data is made anew, and
runs on it are other runs; so change it if a simulator acts or draws differently, and only then."""


def simulator_identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a simulator, with the versions and the source code on which it depends what it does."""
    return {
        "simulator": respelled(dict(settings), first_path),
        "versions": {name: _version(name) for name in _PACKAGES},
        "sources": _sources(str(settings.get("_target_", ""))),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sources(target: str) -> str:
    """The version of foundry's own simulators; of another a hash of its module, and of those beside it in a package."""
    part = None
    with suppress(ImportError, AttributeError, ValueError):  # building it says so
        part = resolve_name(target)
    module = sys.modules.get(getattr(part, "__module__", ""))
    if module is None or getattr(module, "__file__", None) is None:
        return ""
    if module.__name__.startswith(_OWN):
        return _OWN_SOURCES
    file = Path(str(module.__file__))
    files = sorted(file.parent.glob("*.py")) if module.__package__ else [file]
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in files)).hexdigest()
