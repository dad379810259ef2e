"""Without a task the rest works: in a copy of the package, the folder and the options of one task are removed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from support.composition import configure
from support.terminal import passed_on

from foundry.config.record.frozen import save_config
from foundry.tasks import BUILT_IN

REPOSITORY = Path(__file__).resolve().parents[2]
WITHOUT = """
import gc, importlib, json, pkgutil, sys
from pathlib import Path

import pytest

import foundry
from foundry import compose, run
from foundry.config.composition.compose import config_dir
from foundry.core.errors import ConfigError
from foundry.core.tasks import installed_tasks

removed = json.loads(sys.argv[1])
assert Path(foundry.__file__).parents[1] == Path.cwd()
assert sorted(task.name for task in installed_tasks()) == removed["others"]
for module in pkgutil.walk_packages(foundry.__path__, "foundry."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
gc.freeze()

from support.composition import configure
from support.option_words import FREE, OPTIONS, free_words, has_no_value, words_for
from support.tiny import TINY_LM

assert config_dir() == str(Path.cwd() / "conf")
assert not [name for group, names in removed["options"].items() for name in names if name in OPTIONS.get(group, ())]
for place in range(max(len(OPTIONS[group]) for group in FREE)):
    configure(*free_words(place))
for group, option in [(group, option) for group in OPTIONS if group not in FREE for option in OPTIONS[group]]:
    try:
        configure(*words_for(group, option))
    except ConfigError as error:
        assert has_no_value(group, option) and "has no value" in str(error), (group, option, str(error))
    except pytest.skip.Exception:  # a package is not installed
        pass
for path in Path(config_dir(), "experiment").glob("*.yaml"):
    if "model.path=" not in path.read_text():
        try:
            configure(f"experiment={path.stem}")
        except pytest.skip.Exception:
            pass
result = run(compose([*TINY_LM, "hparams.max_steps=2", "tracking=none"]), "run")
assert Path("run/checkpoints/step_00000002").is_dir(), result

from foundry.config.record.frozen import load_config
try:
    load_config(Path("recorded"))
except ConfigError as error:
    print(error)
"""


RECORDED = {
    "post_training": ["objective=dpo", "data=arithmetic", "data.form=preferences"],
    "robots": ["hparams=policy"],
}
"""Overrides of a run of each task."""
TASKS = {name: resolve_name(place) for name, place in BUILT_IN.items()}


@pytest.fixture
def without(task, tmp_path):
    shutil.copytree(REPOSITORY / "foundry", tmp_path / "foundry", ignore=shutil.ignore_patterns(task))
    shutil.copytree(REPOSITORY / "conf", tmp_path / "conf")
    for group, names in TASKS[task].options.items():
        for name in names:
            (tmp_path / "conf" / group / f"{name}.yaml").unlink()
    (tmp_path / "setup.cfg").touch()
    (tmp_path / "recorded").mkdir()
    save_config(configure(*RECORDED[task]), tmp_path / "recorded")
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("task", BUILT_IN)
def test_foundry_works_without_a_task(task, without, cache):
    """Import every module, compose every option, train two steps, and expect a recorded run to be refused."""
    removed = {"options": TASKS[task].options, "others": sorted(name for name in BUILT_IN if name != task)}
    path = os.pathsep.join([str(without), str(REPOSITORY / "tests")])
    environment = passed_on() | {"PYTHONPATH": path, "FOUNDRY_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", WITHOUT, json.dumps(removed)]
    process = subprocess.run(command, cwd=without, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    message = f"belongs to the task {task}, which is not installed here: "
    assert process.stdout.splitlines()[-1].startswith(f"run: recorded/config.yaml {message}")
