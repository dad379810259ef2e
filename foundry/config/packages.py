"""Installed metadata of foundry's distribution, and the optional packages of its extras."""

import re
import shlex

DISTRIBUTION = "hydra-foundry"
INSTALL_PROJECT = "pip install -e '.[dev]'"
"""Command that installs the project in the current folder, with the packages of its tests."""


def missing_message(package: str, extra: str) -> str:
    """Return the message for an optional package that is not installed, with the command that installs it.

    Args:
        package: name of the package.
        extra: extra in setup.cfg that lists the package.
    """
    return f"needs {package}, which is not installed; {pip_command(package, extra)}"


def pip_command(package: str, extra: str) -> str:
    """Return a pip command that installs the packages of an extra, in the versions that the metadata requires.

    Args:
        package: the missing package; the command names only this one if foundry's metadata is not installed.
        extra: extra in setup.cfg that lists the package.
    """
    return f"pip install {shlex.join(_requirements(extra) or [package])}"


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, one for each package; empty without metadata."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    versions: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": re.sub("[-_.]+", "-", extra)}):
            versions[requirement.name] = versions.get(requirement.name, SpecifierSet()) & requirement.specifier
    # Lower bounds first, as setup.cfg writes them.
    return [name + ",".join(sorted(map(str, among), reverse=True)) for name, among in versions.items()]
