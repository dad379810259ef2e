"""The scripts of docs/, as modules."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script(name):
    """docs/<name>.py; nothing of it is run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
