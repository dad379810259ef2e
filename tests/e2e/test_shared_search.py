"""A study in PostgreSQL that two commands share; one of them is killed, and the database is restarted."""

import json
import time
from pathlib import Path

import pytest
from support.postgres import PASSWORD, serve
from support.tiny import TINY_DIT
from support.warm import WarmShell

from foundry.run_dir.study_storage import open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
SEARCH = [
    *["hparams_search=optuna_tpe", *TINY_DIT, "tracking=none", "evaluation.max_samples=8", "hparams.max_steps=20"],
    *["hydra.sweeper.storage=${oc.env:FOUNDRY_TEST_STUDY}", "hydra.sweeper.n_trials=3"],
    *["evaluation.interval=0.5 run", "hydra.sweeper.pruner.n_startup_trials=1"],
]
QUICK = """
from foundry.commands.main import main
from foundry.sweeps.search.commands import Commands

Commands.__init__.__kwdefaults__["takeover_seconds"] = 1.0
main()
"""
STUCK = """
import time

from foundry.commands.main import main
from foundry.evaluators.pruning import Pruning

Pruning.update = lambda *arguments: time.sleep(600)
main()
"""


@pytest.fixture
def server():
    with serve() as server:
        yield server


@pytest.fixture
def shell(tmp_path, cache, server):
    (tmp_path / "quick.py").write_text(QUICK)
    (tmp_path / "stuck.py").write_text(STUCK)
    return WarmShell(tmp_path, cache, {"FOUNDRY_TEST_STUDY": server.url(), "PYTHONPATH": "."})


def wait_for(condition, *processes):
    """Wait until a condition holds; fail if a process ends before."""
    deadline = time.monotonic() + 240
    while not condition():
        is_waiting = time.monotonic() < deadline and all(process.poll() is None for process in processes)
        assert is_waiting, [process.outputs() for process in processes]
        time.sleep(0.05)


def has_begun(sweep):
    """Return whether a job of a sweep runs, or has run."""
    return any(json.loads(path.read_text())["state"] != "queued" for path in sweep.glob("*/status.json"))


@pytest.mark.long
def test_killed_command_loses_no_trial_and_the_password_is_in_no_file(shell, server):
    """The killed command is in its first job, so that the other one takes the trial over."""
    killed = shell.start(*SEARCH, "hydra.sweep.dir=killed", module="stuck")
    wait_for(lambda: has_begun(shell.cwd / "killed"), killed)
    other = shell.start(*SEARCH, "hydra.sweep.dir=other", module="quick")
    wait_for(lambda: has_begun(shell.cwd / "other"), killed, other)
    arguments = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    killed.kill()
    killed.wait(60)
    server.stop()
    wait_for(lambda: "does not respond" in other.outputs()[1], other)
    server.start()
    stdout, stderr = shell.finish(other)
    study = optuna.load_study(study_name="search", storage=open_storage(server.url()))
    trials = [trial for trial in study.trials if trial.params]
    assert [trial.number for trial in trials] == list(range(3))
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
    told = {trial.user_attrs["run_dir"] for trial in trials}
    results = {str(path.parent) for path in shell.cwd.glob("*/*/result.json")}
    assert told == results == {str(shell.cwd / "other" / str(number)) for number in range(3)}
    texts = [path.read_bytes() for path in shell.cwd.rglob("*") if path.is_file()]
    texts += [*arguments, stdout.encode(), stderr.encode(), *(text.encode() for text in killed.outputs())]
    assert not any(PASSWORD.encode() in text for text in texts)
    assert "the storage of the search responds again" in stderr


def test_password_on_the_command_line_is_refused(run_command):
    overrides = [*SEARCH, f"hydra.sweeper.storage='postgresql://me:{PASSWORD}@host/db'"]
    _, stderr = run_command(*overrides, code=2)
    (line,) = stderr.splitlines()
    assert line.startswith("hydra.sweeper.storage: is a secret")
    assert "hydra.sweeper.storage='${oc.env:NAME}'" in line
    assert PASSWORD not in stderr
    assert list(run_command.cwd.iterdir()) == []
