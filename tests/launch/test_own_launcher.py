"""A user's own launcher: the example of docs/bring_your_own.md, and refusals of invalid ones."""

import json
import shlex
import subprocess

import pytest
from hydra import compose, initialize_config_dir
from support.scripts import ROOT, load_script
from support.tiny import TINY_LM

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.core.errors import ConfigError
from foundry.sweeps.plugins import build_launcher

OTHERS = """
from foundry import FrozenLauncher


class Half(FrozenLauncher):
    def submit(self, jobs): ...

    def poll(self, ids): ...


class Plain:
    def __init__(self, work): ...
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The folder with the files of the example, and the command that runs it."""
    folder = tmp_path_factory.mktemp("example")
    page = (ROOT / "docs" / "bring_your_own.md").read_text()
    (block,) = [block for block in load_script("run_blocks").blocks(page) if "mylauncher.py" in block]
    files, separator, command = block.partition("PYTHONPATH=mine")
    subprocess.run(["bash", "-ec", files], cwd=folder, check=True)
    (folder / "mine" / "others.py").write_text(OTHERS)
    (folder / "mine" / "broken.py").write_text("1 / 0\n\n\nclass Launcher:\n    def __init__(self, work): ...\n")
    return folder, separator + command


def composed(example, *overrides):
    install()
    words = [f"hydra.searchpath=[{example[0] / 'mine' / 'conf'}]", "hydra/launcher=processes", *overrides]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return compose(CONFIG_NAME, words, return_hydra_config=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hydra.launcher._target_=mylauncher.ProcesLauncher"],
            "hydra.launcher._target_: is mylauncher.ProcesLauncher but mylauncher has no ProcesLauncher; did you mean "
            "ProcessLauncher?",
        ),
        (
            ["hydra.launcher._target_=mylaunch.Launcher"],
            "hydra.launcher._target_: is mylaunch.Launcher but there is no",
        ),
        (
            ["+hydra.launcher.n_jobs=3"],
            "hydra.launcher.n_jobs: is not an argument of mylauncher.ProcessLauncher; it takes work, num_places, ",
        ),
        (["~hydra.launcher.prefix"], "hydra.launcher.prefix: has no value but mylauncher.ProcessLauncher needs one"),
        (["hydra.launcher.num_places=???"], "hydra.launcher.num_places: has no value; give it as hydra.launcher.num_"),
        (
            ["hydra.mode=RUN"],
            "hydra/launcher: is processes, which starts the jobs of a sweep; add -m, even for a single job",
        ),
    ],
)
def test_composition_refuses_an_invalid_own_launcher(example, monkeypatch, overrides, message):
    monkeypatch.syspath_prepend(example[0] / "mine")
    with pytest.raises(ConfigError) as caught:
        composed(example, *overrides)
    assert str(caught.value).startswith(message)
    assert len(caught.value.violations) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("others.Half", "is others.Half, which lacks 2 methods: cancel, logs"),
        ("others.Plain", "is others.Plain but must be a subclass of foundry.FrozenLauncher"),
        ("broken.Launcher", "is broken.Launcher, which cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_sweep_refuses_a_class_that_is_no_launcher(example, monkeypatch, target, message):
    monkeypatch.syspath_prepend(example[0] / "mine")
    overrides = ["~hydra.launcher.num_places", "~hydra.launcher.prefix", f"hydra.launcher._target_={target}"]
    with pytest.raises(ConfigError) as caught:
        build_launcher(None, None, composed(example, *overrides))
    assert str(caught.value) == f"hydra.launcher._target_: {message}"


@pytest.mark.long
def test_example_of_a_launcher_runs_a_grid_and_records_how_jobs_ended(example):
    folder, command = example
    command = command.rstrip()

    def run(*overrides):
        words = " ".join(shlex.quote(word) for word in (*TINY_LM, *overrides))
        result = subprocess.run(
            ["bash", "-c", f"{command} {words}"], cwd=folder, capture_output=True, text=True, check=False
        )
        return result.returncode, result.stdout + result.stderr

    code, output = run()
    assert code == 0, output
    assert "3 jobs: 3 finished" in output
    assert "job 1 (hparams.seed=2): running; 1 queued, 2 running" in output

    kill = "hydra.launcher.prefix=[sh,-c,'echo the last word; kill -9 $$']"
    code, output = run("hydra.sweep.dir=killed", "hparams.seed=1", kill)
    assert code == 1, output
    status = json.loads((folder / "killed" / "0" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "exit code -9; last output: the last word")
