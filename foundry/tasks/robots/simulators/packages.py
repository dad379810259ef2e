"""The packages that simulators need, imported when one is built."""

import os
import sys
from types import ModuleType

from foundry.core.errors import ConfigError
from foundry.tasks.robots.schemas.simulator import missing_package


def need(package: str, extra: str) -> None:
    """Make sure that a package is there.

    Raises:
        ConfigError: it is not installed.
    """
    if wrong := list(missing_package(package, extra)):
        raise ConfigError(wrong)


def choose_egl() -> bool:
    """Have MuJoCo draw through EGL, where the environment variable MUJOCO_GL does not say how; whether it was chosen.

    MuJoCo reads that variable when it is imported, which other packages do, too.
    """
    is_open = sys.platform == "linux" and "mujoco" not in sys.modules and not os.environ.get("MUJOCO_GL")
    if is_open:
        os.environ["MUJOCO_GL"] = "egl"
    return is_open


def import_mujoco() -> ModuleType:
    """MuJoCo; where EGL is missing, and nothing else was asked for, it simulates all the same, and draws nothing.

    Raises:
        ConfigError: it is not installed.
    """
    need("mujoco", "robot")
    is_chosen = choose_egl()
    try:
        import mujoco
    except (ImportError, AttributeError):  # PyOpenGL says by either that it has found no library
        if not is_chosen:
            raise
        os.environ["MUJOCO_GL"] = "disabled"
        import mujoco
    module: ModuleType = mujoco
    return module
