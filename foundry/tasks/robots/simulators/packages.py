"""Lazy imports of the packages that simulators need."""

import os
import sys
from types import ModuleType

from foundry.core.errors import ConfigError
from foundry.tasks.robots.schemas.simulator import missing_package


def need(package: str, extra: str) -> None:
    """Check that a package is installed.

    Raises:
        ConfigError: if it is not installed.
    """
    if wrong := list(missing_package(package, extra)):
        raise ConfigError(wrong)


def choose_egl() -> bool:
    """Select EGL for MuJoCo on Linux, unless MUJOCO_GL is set or MuJoCo is imported; return whether it was selected.

    MuJoCo reads MUJOCO_GL at import, so call this before any import of a package that imports MuJoCo.
    """
    is_open = sys.platform == "linux" and "mujoco" not in sys.modules and not os.environ.get("MUJOCO_GL")
    if is_open:
        os.environ["MUJOCO_GL"] = "egl"
    return is_open


def import_mujoco() -> ModuleType:
    """Import MuJoCo; if EGL was selected by default but is missing, rendering is disabled and only simulation works.

    Raises:
        ConfigError: if MuJoCo is not installed.
    """
    need("mujoco", "robot")
    is_chosen = choose_egl()
    try:
        import mujoco
    except (ImportError, AttributeError):  # both mean that PyOpenGL found no library
        if not is_chosen:
            raise
        os.environ["MUJOCO_GL"] = "disabled"
        import mujoco
    module: ModuleType = mujoco
    return module
