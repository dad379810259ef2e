"""A task of another package, found by its entry point: `outside/waves`."""

import json
import os
from pathlib import Path

import pytest
from support.terminal import Shell

from foundry.config.record.frozen import load_config
from foundry.core.errors import ConfigError

OUTSIDE = Path(__file__).with_name("outside")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the metadata that pip would install for the package `waves`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "waves-1.0.dist-info").mkdir()
    about = folder / "waves-1.0.dist-info"
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: waves\nVersion: 1.0\n")
    about.joinpath("entry_points.txt").write_text("[foundry.tasks]\nwaves = waves:TASK\n")
    return folder


@pytest.fixture
def installed(tmp_path, cache, site):
    shell = Shell(tmp_path, cache)
    shell.environment["PYTHONPATH"] = os.pathsep.join([str(OUTSIDE), str(site)])
    return shell


@pytest.mark.long
def test_external_task_trains_plots_and_evaluates_while_installed(installed):
    out, _ = installed.run("experiment=waves", "hydra.run.dir=run", "tracking.mlflow=false")
    assert str(installed.cwd / "run/plots/error.png") in out
    last = json.loads((installed.cwd / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["val_error"] < 1
    installed.run("run=run", "horizon=5", module="foundry.eval")
    found = json.loads((installed.cwd / "run/eval.json").read_text())
    assert (found["num_values"], found["largest"]) == (5, 1.0)
    _, error = installed.run("run=run", "episodes=3", module="foundry.eval", code=2)
    assert error.startswith("episodes: is 3 but belongs to the evaluation of policies in a simulator, and ")
    for trust in (True, False):  # The package is not installed in this process.
        with pytest.raises(ConfigError, match="uses parts of waves, which is not installed here: model"):
            load_config(installed.cwd / "run", trust=trust)


def test_external_task_adds_its_checks_sizes_and_resolver(installed):
    _, error = installed.run("experiment=waves", "data.hertz=0.2", "data.window=6", "model.window=5", code=2)
    assert error.splitlines() == [
        "model.window: is 5 but must be data.window=6; leave it out to follow the data",
        "data.window: is 6 but data.period is 5; choose a smaller one",
    ]
    out, _ = installed.run("experiment=waves", "--cfg", "job", "--resolve")
    assert "  period: 20\n" in out


def test_invalid_task_entry_point_is_a_one_line_error(installed, tmp_path):
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    about.joinpath("entry_points.txt").write_text("[foundry.tasks]\nbroken = json:dumps\n")
    installed.environment["PYTHONPATH"] = str(tmp_path)
    _, error = installed.run("--cfg", "job", code=2)
    assert error == (
        "task: entry point broken of foundry.tasks: json:dumps is not a foundry.core.tasks.Task; "
        "fix its package or uninstall it\n"
    )
