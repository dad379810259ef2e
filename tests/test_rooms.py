"""Layout of tests: folders mirror the package, and file names are unique."""

import ast
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from support.warm_server import MODULES

ROOT = Path(__file__).resolve().parent.parent
# Test folders that cover several rooms.
ACROSS = {"distributed", "docs", "e2e", "evidence", "parity", "security", "slurm"}


def rooms_of_modules():
    """Return, for each module name, the rooms with a module of that name."""
    found = {}
    for path in (ROOT / "foundry").glob("*/**/*.py"):
        found.setdefault(path.stem, set()).add(path.relative_to(ROOT / "foundry").parts[0])
    return found


def test_test_folders_are_named_after_rooms_of_the_package():
    with_tests = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    rooms = {path.parent.name for path in (ROOT / "foundry").glob("*/__init__.py")}
    assert with_tests - ACROSS <= rooms


def test_test_file_named_after_a_module_is_in_the_room_of_the_module():
    rooms, strayed = rooms_of_modules(), []
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        folder, name = path.relative_to(ROOT / "tests").parts[0], path.stem.removeprefix("test_")
        if folder not in ACROSS and folder not in rooms.get(name, {folder}):
            strayed.append(f"{path.relative_to(ROOT)}: {name}.py is in {sorted(rooms[name])}")
    assert strayed == []


def test_test_file_names_are_unique():
    """Pytest imports test files by name and rejects duplicates."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_preloaded_modules_of_warm_processes_exist():
    """A missing module slows warm processes down without an error."""
    assert [name for name in MODULES if name.startswith("foundry.") and find_spec(name) is None] == []


def asks_torch_cuda(node):
    """Return whether a syntax node reads `torch.cuda`, imports it, or imports from it."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
            return True
        case ast.Import(names=names):
            return any(f"{name.name}.".startswith("torch.cuda.") for name in names)
        case ast.ImportFrom(module=str(module), names=names):
            return any(f"{module}.{name.name}.".startswith("torch.cuda.") for name in names)
    return False


def test_torch_cuda_is_used_in_three_modules_only():
    """parallel/device.py queries GPUs, varlen attention checks the GPU generation, and rehearsals fake `torch.cuda`."""
    asking = [
        str(path.relative_to(ROOT / "foundry"))
        for path in sorted((ROOT / "foundry").rglob("*.py"))
        if any(map(asks_torch_cuda, ast.walk(ast.parse(path.read_text()))))
    ]
    assert asking == ["models/attention/varlen.py", "parallel/device.py", "rehearsal/fake_cuda.py"]


def test_asks_torch_cuda_detects_every_spelling():
    spellings = [
        "torch.cuda.is_available()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import amp",
    ]
    others = ["torch.backends.cuda.matmul", "from torch.utils import data", "cuda.is_available()", "import torch"]
    for text in (*spellings, *others):
        assert any(map(asks_torch_cuda, ast.walk(ast.parse(text)))) == (text in spellings), text
