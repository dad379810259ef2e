"""Scripts of docs/ as modules."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script(name):
    """Import docs/<name>.py without running its main function."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
