"""Imports come from installed packages and PYTHONPATH; modules in the current folder need `PYTHONPATH=.`"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foundry
from foundry.core import safe_path
from foundry.core.safe_path import VARIABLE, environment_of_module, leave_current_folder, local_remedy
from foundry.generation.scoring import Answer
from foundry.launch import local, snapshot
from foundry.tasks.post_training.environments.worker import Worker

PACKAGE = Path(foundry.__file__).parent
STARTED = [file for file in sorted(PACKAGE.rglob("*.py")) if "\nif __name__ ==" in file.read_text(encoding="utf-8")]
HOSTILE = ("torch", "yaml", "omegaconf", "json", "dataclasses", "pathlib", "hydra_plugins/own")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Change to a folder with modules that create the file `ran` on import; return the path of `ran`."""
    for name in HOSTILE:
        file = tmp_path / "folder" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "ran"


@pytest.fixture
def start(monkeypatch):
    """Return a function that sets sys.path as at the start of a process and calls `leave_current_folder`."""

    def set_path(*path, variables=()):
        monkeypatch.setattr(sys, "path", [*path])
        for name in (VARIABLE, "PYTHONPATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables:
            monkeypatch.setenv(name, value)
        leave_current_folder()
        return sys.path

    monkeypatch.setenv(VARIABLE, "restored by monkeypatch")
    monkeypatch.setenv("PYTHONPATH", "restored by monkeypatch")
    return set_path


def test_current_folder_is_removed_from_the_front_of_sys_path(tmp_path, start, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert start(here, "/lib", "/site") == ["/lib", "/site"]
    assert os.environ[VARIABLE] == "1"
    assert "PYTHONPATH" not in os.environ
    assert start("", "/lib") == ["/lib"]
    assert start("/bin", "/lib") == ["/bin", "/lib"]
    assert start() == []


def test_pythonpath_folder_stays_in_sys_path(tmp_path, start, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert start(here, here, "/lib") == [here, "/lib"]
    assert start(here, "/lib", variables=[(VARIABLE, "1")]) == [here, "/lib"]


@pytest.mark.parametrize("before", ["", "/mine"])
def test_uninstalled_checkout_moves_to_the_end_of_sys_path(before, start, monkeypatch):
    root = str(PACKAGE.parent)
    monkeypatch.chdir(root)
    assert start(root, "/lib", variables=[("PYTHONPATH", before)]) == ["/lib", root]
    assert os.environ["PYTHONPATH"] == (f"/mine:{root}" if before else root)
    assert start(root, "/lib", root) == ["/lib", root]
    assert "PYTHONPATH" not in os.environ


@pytest.mark.parametrize("file", STARTED, ids=[file.relative_to(PACKAGE).as_posix() for file in STARTED])
def test_every_entry_module_leaves_the_current_folder_first(file):
    docstring, first, *rest = ast.parse(file.read_text(encoding="utf-8")).body
    assert isinstance(docstring, ast.Expr)
    command = "main" if file.stem == "__main__" else file.stem
    starts = {
        f"from foundry.core.safe_path import run_command\n    run_command('{command}')": not rest,
        "from foundry.core.safe_path import leave_current_folder\n    leave_current_folder()": True,
    }
    assert starts[ast.unparse(first).removeprefix("if __name__ == '__main__':\n    ")]


def test_leave_current_folder_imports_os_and_sys_only():
    tree = ast.parse(Path(safe_path.__file__).read_text(encoding="utf-8"))
    leave = next(node for node in tree.body if getattr(node, "name", "") == "leave_current_folder")
    imports = [node for node in (*tree.body, *ast.walk(leave)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports] == ["import os", "import sys"]


def test_command_does_not_import_modules_of_the_current_folder(hostile):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-m", "foundry.report", "dir=."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert not hostile.exists()


def test_environment_worker_inherits_sys_path(hostile, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    text = (
        "import os\nclass Judge:\n    def score(self, answers):\n        return [{'set': 'PYTHONPATH' in os.environ}]\n"
    )
    (own / "judge.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(own)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    worker = Worker({"_target_": "judge.Judge"}, 10.0)
    assert worker.score([Answer("a")]) == [{"set": 0.0}]
    worker.close()
    assert not hostile.exists()


def test_ranks_start_with_safe_path_set(monkeypatch):
    seen = []

    class Process:
        def __init__(self, **options):
            seen.append(os.environ.get(VARIABLE))

        def start(self):
            seen.append(os.environ.get(VARIABLE))

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(local, "START", type("Start", (), {"Process": Process}))
    local._start({}, 1, ())
    assert seen == ["1", "1"]
    assert VARIABLE not in os.environ


def test_environment_of_module_passes_sys_path_to_children(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "/a b", "/c"])
    assert environment_of_module()["PYTHONPATH"] == ".:/a b:/c"


def test_local_remedy_suggests_pythonpath_for_a_local_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()
    Path("package").mkdir()
    assert local_remedy("own") == "; own.py is in the current folder: start the command with PYTHONPATH=."
    assert local_remedy("package").endswith("PYTHONPATH=.")
    assert local_remedy("missing") == ""


def test_code_snapshot_copies_files_on_the_import_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("torch.py", "mine/model.py", "mine/inner/part.py", "other/model.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "."], check=True)
    monkeypatch.setattr(sys, "path", ["/lib", str(tmp_path / "mine")])
    assert sorted(snapshot._tracked_files()) == ["mine/inner/part.py", "mine/model.py"]
    assert snapshot.copied_folders(tmp_path / "code") == []
    (tmp_path / "code" / "mine").mkdir(parents=True)
    assert snapshot.copied_folders(tmp_path / "code") == [tmp_path / "code" / "mine"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/lib"])
    assert "torch.py" in snapshot._tracked_files()
    assert snapshot.copied_folders(tmp_path / "code") == []


FINDER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

PACKAGE = {package!r}

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "foundry":
            return spec_from_file_location(name, PACKAGE + "/__init__.py")
        return PathFinder.find_spec(name, path=[PACKAGE]) if name.rpartition(".")[0] == "foundry" else None

sys.path[:] = [entry for entry in sys.path if entry != {root!r}]
sys.meta_path.append(Finder)
"""


@pytest.mark.parametrize("module", ["foundry", "foundry.report"])
def test_folder_named_foundry_does_not_shadow_an_editable_install(module, tmp_path):
    """Editable installs append a finder such as FINDER; a namespace package in the current folder would precede it."""
    (tmp_path / "here/foundry/foundry").mkdir(parents=True)
    (tmp_path / "site").mkdir()
    finder = FINDER.format(package=str(PACKAGE), root=str(PACKAGE.parent))
    (tmp_path / "site/sitecustomize.py").write_text(finder)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    command = [sys.executable, "-m", module, "--version"]
    ended = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"foundry {foundry.__version__} ")
