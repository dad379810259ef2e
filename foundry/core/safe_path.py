"""Importing from installed packages and PYTHONPATH only, since the current folder may be somebody else's.

`python -m` and `python -c` put the current folder before the standard library. Each module that `python -m` starts
calls `leave_current_folder` before its other imports. This module imports `os` and `sys` only, which Python has loaded.
"""

import os
import sys

VARIABLE = "PYTHONSAFEPATH"
"""Keeps the current folder out of the import path of a Python process that is started with it."""


def leave_current_folder() -> None:
    """Remove the current folder from the front of `sys.path`, and keep it out of Python processes started from here.

    If this package was imported from the current folder, a checkout of foundry, the folder becomes the last entry.
    """
    if sys.flags.safe_path or os.environ.get(VARIABLE):
        return
    os.environ[VARIABLE] = "1"
    try:
        folder = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        return
    if not sys.path or sys.path[0] not in ("", folder):
        return
    del sys.path[0]
    root = __file__.removesuffix(f"{os.sep}foundry{os.sep}core{os.sep}safe_path.py")
    if root in ("", folder) and folder not in sys.path:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))


def run_command(name: str) -> None:
    """Call `main()` of a module of foundry.commands, once the current folder has left the import path.

    If the current folder contains a checkout called `foundry`, Python may have taken that folder for the package, and
    found this module through the installed one; the package is imported again then.
    """
    leave_current_folder()
    if getattr(sys.modules["foundry"], "__file__", None) is None:
        for module in [module for module in sys.modules if module.partition(".")[0] == "foundry"]:
            del sys.modules[module]
    from importlib import import_module

    import_module(f"foundry.commands.{name}").main()


def environment_of_module() -> dict[str, str]:
    """Return environment variables that give `python -P -m MODULE` the import path of this process."""
    entries = (entry or os.curdir for entry in sys.path)  # an empty one would be dropped
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def local_remedy(name: str) -> str:
    """Return the end of a message about a module that is not found: the remedy if it lies in the current folder."""
    found = [place for place in (f"{name}.py", name) if os.access(place, os.F_OK)]
    return f"; {found[0]} is in the current folder: start the command with PYTHONPATH=." if found else ""
