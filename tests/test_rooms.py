"""Tests are where the code is that they are about."""

import ast
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from support.warm_server import MODULES

ROOT = Path(__file__).resolve().parent.parent
# Folders of tests of several rooms together.
ACROSS = {"distributed", "docs", "e2e", "evidence", "parity", "security", "slurm"}


def rooms_of_modules():
    """The rooms that have a module of some name."""
    found = {}
    for path in (ROOT / "foundry").glob("*/**/*.py"):
        found.setdefault(path.stem, set()).add(path.relative_to(ROOT / "foundry").parts[0])
    return found


def test_a_folder_of_tests_is_a_room_of_the_package():
    with_tests = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    rooms = {path.parent.name for path in (ROOT / "foundry").glob("*/__init__.py")}
    assert with_tests - ACROSS <= rooms


def test_a_file_of_tests_named_after_a_module_is_in_its_room():
    rooms, strayed = rooms_of_modules(), []
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        folder, name = path.relative_to(ROOT / "tests").parts[0], path.stem.removeprefix("test_")
        if folder not in ACROSS and folder not in rooms.get(name, {folder}):
            strayed.append(f"{path.relative_to(ROOT)}: {name}.py is in {sorted(rooms[name])}")
    assert strayed == []


def test_files_of_tests_have_names_of_their_own():
    """Pytest imports them by name, and refuses a second file of the same name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_what_warm_processes_have_imported_is_there():
    """Where one of these cannot be imported, they work all the same, and are slow."""
    assert [name for name in MODULES if name.startswith("foundry.") and find_spec(name) is None] == []


def asks_torch_cuda(node):
    """Whether a node of a syntax tree reads `torch.cuda`, or imports it or from it."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
            return True
        case ast.Import(names=names):
            return any(f"{name.name}.".startswith("torch.cuda.") for name in names)
        case ast.ImportFrom(module=str(module), names=names):
            return any(f"{module}.{name.name}.".startswith("torch.cuda.") for name in names)
    return False


def test_one_module_asks_torch_about_gpus():
    """Beside it, attention asks for the GPU's generation, which has its kernel or not; a rehearsal has fake GPUs."""
    asking = [
        str(path.relative_to(ROOT / "foundry"))
        for path in sorted((ROOT / "foundry").rglob("*.py"))
        if any(map(asks_torch_cuda, ast.walk(ast.parse(path.read_text()))))
    ]
    assert asking == ["models/varlen.py", "parallel/device.py", "rehearsal/fake_cuda.py"]


def test_any_spelling_of_torch_cuda_counts_as_asking():
    spellings = [
        "torch.cuda.is_available()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import amp",
    ]
    others = ["torch.backends.cuda.matmul", "from torch.utils import data", "cuda.is_available()", "import torch"]
    for text in (*spellings, *others):
        assert any(map(asks_torch_cuda, ast.walk(ast.parse(text)))) == (text in spellings), text
