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
    *["hydra.sweeper.storage=${oc.env:FOUNDRY_TEST_STUDY}", "hydra.sweeper.n_trials=6"],
    "hydra.sweeper.pruner.n_startup_trials=2",
]
QUICK = """
from foundry.commands.main import main
from foundry.sweeps.search.commands import Commands

Commands.__init__.__kwdefaults__["takeover_seconds"] = 4.0
main()
"""


@pytest.fixture
def server():
    with serve() as server:
        yield server


@pytest.fixture
def shell(tmp_path, cache, server):
    (tmp_path / "quick.py").write_text(QUICK)
    return WarmShell(tmp_path, cache, {"FOUNDRY_TEST_STUDY": server.url(), "PYTHONPATH": "."})


def wait_for(condition, *processes):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, [process.outputs() for process in processes]
        time.sleep(0.05)


def has_run(sweep, state):
    """Return whether a job of a sweep has a state."""
    return any(json.loads(path.read_text())["state"] == state for path in sweep.glob("*/status.json"))


@pytest.mark.long
def test_killed_command_loses_no_trial_and_the_password_is_in_no_file(shell, server):
    killed = shell.start(*SEARCH, "hydra.sweep.dir=killed", module="quick")
    wait_for(lambda: has_run(shell.cwd / "killed", "running"), killed)
    other = shell.start(*SEARCH, "hydra.sweep.dir=other", module="quick")
    wait_for(lambda: has_run(shell.cwd / "other", "running"), killed, other)
    arguments = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    killed.kill()
    killed.wait(60)
    server.stop()
    wait_for(lambda: "does not respond" in other.outputs()[1], other)
    server.start()
    stdout, stderr = shell.finish(other)
    study = optuna.load_study(study_name="search", storage=open_storage(server.url()))
    trials = [trial for trial in study.trials if trial.params]
    assert [trial.number for trial in trials] == list(range(6))
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
    told = {trial.user_attrs["run_dir"] for trial in trials}
    results = {str(path.parent) for path in shell.cwd.glob("*/*/result.json")}
    assert told == results
    assert len(told) == 6
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
