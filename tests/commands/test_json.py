"""`--json`: one JSON document on stdout, all other output on stderr, unchanged exit codes."""

import json
import shutil
from pathlib import Path

import pytest
from support.tiny import TINY_LM

STORED = Path(__file__).parents[1] / "stored" / "run-0.1"


@pytest.fixture
def stored(run_command):
    """Run commands in a folder with the finished runs `run` and `other`, which differ in their seeds."""
    for name in ("run", "other"):
        shutil.copytree(STORED, run_command.cwd / name, symlinks=True)
    config = run_command.cwd / "other/config.yaml"
    config.write_text(config.read_text().replace("seed: 42", "seed: 1"))
    assert "seed: 1" in config.read_text()
    return run_command


def facts(run, *words, code=0):
    """Run a command with a leading --json; return its document and its stderr."""
    out, error = run("--json", *words, code=code)
    return json.loads(out), error


def test_eval_json_equals_its_output_file(stored):
    found, error = facts(stored, "eval", "run=run", "max_samples=8", "out=measured.json")
    assert found == json.loads((stored.cwd / "measured.json").read_text())
    assert error.splitlines()[0] == f"checkpoint     {found['checkpoint']}"


def test_sample_json_has_file_and_texts(stored):
    found, error = facts(stored, "sample", "run=run", "prompt='1+1'", "max_new_tokens=4", "out=drawn", "temperature=0")
    assert found["file"] == "drawn.txt"
    assert found["texts"][0].startswith("1+1")
    assert found["texts"][0] in error


def test_export_json_has_folder_and_checkpoint(stored):
    found, _ = facts(stored, "export", "run=run", "out=exported")
    assert found == {"out": "exported", "checkpoint": "step_00000004"}


def test_diff_json_has_both_values_of_each_difference(stored):
    found, error = facts(stored, "diff", "run", "other", code=1)
    assert found["settings"] == [{"key": "hparams.seed", "run": 42, "against": 1}]
    assert (found["same"], found["first_difference"], found["common_steps"]) == (False, None, 4)
    assert {"key": "step", "run": 4, "against": 4} in found["results"]
    assert "hparams.seed" in error
    assert facts(stored, "diff", "run", "run")[0]["same"]


def test_report_json_equals_its_output_file(stored):
    (stored.cwd / "sweep").mkdir()
    for number, name in enumerate(("run", "other")):
        (stored.cwd / name).rename(stored.cwd / "sweep" / str(number))
    found, error = facts(stored, "report", "dir=sweep", "picture=false")
    assert found == json.loads((stored.cwd / "sweep/report.json").read_text())
    assert (found["counts"], len(found["jobs"])) == ({"finished": 2}, 2)
    assert "report.json" in error


def test_plan_json_equals_plan_json_in_the_run_directory(run_command):
    found, error = facts(run_command, "plan", *TINY_LM, "hydra.run.dir=plan")
    assert found == json.loads((run_command.cwd / "plan/plan.json").read_text())
    assert "plan/schedule.csv" in error


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_lr_find_json_is_printed_once_with_several_processes(shell, processes):
    words = ["lr_find.steps=20", "lr_find.min=1e-4", f"distributed.nproc_per_node={processes}", "hydra.run.dir=found"]
    found, error = facts(shell.run, "lr_find", *TINY_LM, "tracking=none", "optimizer=adamw", *words)
    assert found == json.loads((shell.cwd / "found/lr_find.json").read_text())
    assert set(found) == {"suggestion", "rates", "losses"}
    assert "step 20/20" in error


def test_new_and_sync_print_json(run_command):
    found, error = facts(run_command, "new", "my_project")
    assert found == {"dir": str(run_command.cwd / "my_project")}
    assert "pip install" in error
    assert facts(run_command, "sync", "dir=my_project")[0] == {"sent": 0}


@pytest.mark.parametrize(
    "words", [("eval", "run=nowhere"), ("plan", "hparams.leer=1"), ("report", "dir=nowhere"), ("sync",)]
)
def test_errors_with_json_stay_one_line_on_stderr(words, run_command):
    out, error = run_command(*words, "--json", code=2)
    assert out == ""
    assert error.count("\n") == 1
    assert error == run_command(*words, code=2)[1]
