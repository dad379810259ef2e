"""Installed metadata of foundry's distribution, and the optional packages of its extras."""

import re
import shlex

DISTRIBUTION = "hydra-foundry"
_OLD_DISTRIBUTION = "foundry"
"""Name of the distribution in builds of 0.1; on the public index it belongs to a package of other authors."""
INSTALL_PROJECT = "pip install -e '.[dev]'"
"""Command that installs the project in the current folder, with the packages of its tests."""
_CONSOLE_SCRIPT = "foundry.commands.main:main"


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


def conflict_message() -> str | None:
    """Return a warning if an installed build of 0.1 shares its files with this version; None otherwise.

    The distribution changed its name, so pip installs this version beside 0.1 and overwrites files of 0.1. The
    unrelated package of the old name on the public index has another console script, and a stale `foundry.egg-info` in
    a checkout has no RECORD: the package and the egg-info cause no warning.
    """
    folders = _distribution_folders(DISTRIBUTION)
    for folder, version in _distribution_folders(_OLD_DISTRIBUTION).items():
        if folder in folders:
            distributions_text = f"{_OLD_DISTRIBUTION} {version} and {DISTRIBUTION} {folders[folder]}"
            remedy = f"Uninstall both, then install {DISTRIBUTION} again"
            reason = f"uninstalling {_OLD_DISTRIBUTION} alone deletes files of {DISTRIBUTION}"
            return f"{distributions_text} are installed in the same folder. {remedy} ({reason})."
    return None


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


def _distribution_folders(name: str) -> dict[str, str]:
    """Return folder and version of each installed distribution of this name that has foundry's console script."""
    from importlib.metadata import distributions

    return {
        str(distribution.locate_file("")): distribution.version
        for distribution in distributions(name=name)
        if distribution.read_text("RECORD") is not None
        and any(e.value == _CONSOLE_SCRIPT for e in distribution.entry_points)
    }
