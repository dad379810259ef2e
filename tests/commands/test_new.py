"""A project from `python -m foundry.new` trains, and its test passes, as it was written."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.in_process import Commands

TEMPLATE = Path(__file__).resolve().parents[2] / "foundry" / "commands" / "project_template"
FILES = {
    ".gitignore",
    "README.md",
    "pyproject.toml",
    "conf/data/my_data.yaml",
    "conf/experiment/wide.yaml",
    "conf/model/my_model.yaml",
    "conf/small_runs.yaml",
    "small_runs/__init__.py",
    "small_runs/__main__.py",
    "small_runs/data.py",
    "small_runs/model.py",
    "tests/test_training.py",
}


@pytest.fixture
def project(run_command):
    stdout, _ = run_command("Small-Runs", module="foundry.new")
    assert stdout.splitlines()[-1].split() == ["python", "-m", "small_runs"]
    return run_command.cwd / "Small-Runs"


def run_in(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(TEMPLATE.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_files_have_its_name_and_pass_the_linter(project):
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == FILES
    assert not [name for name in FILES if "my_project" in (project / name).read_text()]
    assert (
        run_in(Path.cwd(), "ruff", "check", "--no-cache", "--ignore=D,ANN,I001", str(project)) == "All checks passed!\n"
    )


def test_its_test_passes_in_this_process(project, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(project)
    before = set(sys.modules)
    try:
        tests = runpy.run_path(str(project / "tests" / "test_training.py"))
        tests["test_two_steps_of_training"](tmp_path)
        assert tests["EXPERIMENTS"] == ["wide"]
        tests["test_every_experiment_composes"]("wide")
    finally:
        for name in [name for name in sys.modules if name not in before and name.partition(".")[0] == "small_runs"]:
            del sys.modules[name]


@pytest.mark.long
def test_its_test_passes_as_written(project):
    assert "2 passed" in run_in(project, "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")


def test_its_options_compose_as_they_are(project, cache):
    run_command = Commands(project, cache, {"PYTHONPATH": "."})
    stdout, _ = run_command("--cfg", "job", "experiment=wide", module="small_runs")
    assert "_target_: small_runs.model.MyModel\n" in stdout
    assert "  width: 128\n" in stdout
    _, stderr = run_command("model.widht=3", module="small_runs", code=2)
    assert stderr == "model.widht: is no key of model; did you mean model.width?\n"


@pytest.mark.long
def test_its_readme_runs(project):
    run_in(project, "small_runs", "hparams.max_steps=40", "hydra.run.dir=runs/one", "tracking.mlflow=false")
    assert (project / "runs" / "one" / "result.json").is_file()
    run_in(project, "small_runs", "-m", "hparams.lr=1e-3,3e-3", "hparams.max_steps=2", "tracking=none")
    assert len(list((project / "multirun").glob("*/*/result.json"))) == 2
    plan = ("--config-dir", "conf", "--config-name", "small_runs")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TEMPLATE.parents[2]), "."))}
    command = [sys.executable, "-m", "foundry.plan", *plan]
    assert subprocess.run(command, cwd=project, env=environment, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["full"], "dir: is full, which exists and is not an empty folder; choose another"),
        (
            ["other", "name=3d"],
            "name: is 3d, which is no name of a Python package (a-z, 0-9 and _); choose another, as",
        ),
        (["other", "name=class"], "name: is class, which is no name of a Python package"),
        (["other", "name=torch"], "name: gives the package the name torch, that of a module that is installed"),
        (["tests"], "dir: gives the package the name tests, that of a folder of the project; choose another, as"),
        (["one", "two"], "one: is not of the form key=value"),
        ([], "dir: has no value"),
    ],
)
def test_a_project_that_cannot_be_written_is_a_line(run_command, words, message):
    (run_command.cwd / "full").mkdir()
    (run_command.cwd / "full" / "notes.txt").write_text("mine")
    _, stderr = run_command(*words, module="foundry.new", code=2)
    assert stderr.replace(f"{run_command.cwd}/", "").startswith(message)
    assert [path.name for path in run_command.cwd.rglob("*")] == ["full", "notes.txt"]


def test_an_empty_folder_is_filled(run_command):
    (run_command.cwd / "mine").mkdir()
    run_command("mine", "name=own_runs", module="foundry.new")
    assert (run_command.cwd / "mine" / "own_runs" / "model.py").is_file()
