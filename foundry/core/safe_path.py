"""Import path without the current folder, which may belong to somebody else.

`python -m` and `python -c` put the current folder before the standard library. Each module that `python -m` starts
calls `leave_current_folder` before its other imports. This module imports only `os` and `sys`, which Python has already
loaded.
"""

import os
import sys

VARIABLE = "PYTHONSAFEPATH"
"""Environment variable that keeps the current folder out of the import path of a Python process started with it."""


def leave_current_folder() -> None:
    """Remove the current folder from the front of `sys.path`, and keep it out of Python processes started from here.

    If foundry was imported from the current folder, a checkout of foundry, that folder becomes the last entry instead.
    """
    if sys.flags.safe_path or os.environ.get(VARIABLE):
        return
    os.environ[VARIABLE] = "1"
    try:
        folder = os.getcwd()  # noqa: PTH109
    except OSError:  # the folder was deleted
        return
    if not sys.path or sys.path[0] not in ("", folder):
        return
    del sys.path[0]
    root = __file__.removesuffix(f"{os.sep}foundry{os.sep}core{os.sep}safe_path.py")
    if root in ("", folder) and folder not in sys.path:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))


def run_command(name: str) -> None:
    """Call `main()` of a module of foundry.commands, after removing the current folder from the import path.

    If the current folder contains a checkout called `foundry`, Python may have taken that folder for the package, and
    found this module through the installed package. In that case the package is imported again.
    """
    leave_current_folder()
    if getattr(sys.modules["foundry"], "__file__", None) is None:
        for module in [module for module in sys.modules if module.partition(".")[0] == "foundry"]:
            del sys.modules[module]
    from importlib import import_module

    import_module(f"foundry.commands.{name}").main()


def environment_of_module() -> dict[str, str]:
    """Return environment variables that give `python -P -m MODULE` the import path of this process."""
    entries = (entry or os.curdir for entry in sys.path)  # an empty entry would be dropped
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def local_remedy(name: str) -> str:
    """Return the end of a message about a missing module: the remedy if the module is in the current folder, or ""."""
    entries = [entry for entry in (f"{name}.py", name) if os.access(entry, os.F_OK)]
    return f"; {entries[0]} is in the current folder: start the command with PYTHONPATH=." if entries else ""
