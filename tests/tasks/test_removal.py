"""Without a task the rest works: in a copy of the package, its folder and options are removed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.composition import configure
from support.terminal import passed_on

from foundry.config.record.frozen import save_config
from foundry.tasks.robots import TASK

REPOSITORY = Path(__file__).resolve().parents[2]
WITHOUT = """
import importlib, pkgutil, sys
from pathlib import Path

import foundry
from foundry import compose, run
from foundry.config.composition.compose import config_dir
from foundry.core.errors import ConfigError
from foundry.core.tasks import installed_tasks

assert Path(foundry.__file__).parents[1] == Path.cwd() and installed_tasks() == ()
for module in pkgutil.walk_packages(foundry.__path__, "foundry."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from support.composition import configure
from support.option_words import FREE, OPTIONS, free_words, has_no_value, words_for
from support.tiny import TINY_LM

assert config_dir() == str(Path.cwd() / "conf")
assert OPTIONS["simulator"] == ["none"] and "scenes" not in OPTIONS["data"]
for place in range(max(len(OPTIONS[group]) for group in FREE)):
    configure(*free_words(place))
for group, option in [(group, option) for group in OPTIONS if group not in FREE for option in OPTIONS[group]]:
    try:
        configure(*words_for(group, option))
    except ConfigError as error:
        assert has_no_value(group, option) and "has no value" in str(error), (group, option, str(error))
for path in Path(config_dir(), "experiment").glob("*.yaml"):
    if "model.path=" not in path.read_text():
        configure(f"experiment={path.stem}")
result = run(compose([*TINY_LM, "hparams.max_steps=2", "tracking=none"]), "run")
assert Path("run/checkpoints/step_00000002").is_dir(), result

from foundry.config.record.frozen import load_config
try:
    load_config(Path("policy"))
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(REPOSITORY / "foundry", root / "foundry", ignore=shutil.ignore_patterns("__pycache__", TASK.name))
    shutil.copytree(REPOSITORY / "conf", root / "conf")
    for group, names in TASK.options.items():
        for name in names:
            (root / "conf" / group / f"{name}.yaml").unlink()
    (root / "setup.cfg").touch()
    (root / "policy").mkdir()
    save_config(configure("hparams=policy"), root / "policy")
    return root


def test_foundry_works_without_the_robots_task(without, cache):
    """Import every module, compose every option, train two steps, and expect a recorded policy to be refused."""
    path = os.pathsep.join([str(without), str(REPOSITORY / "tests")])
    environment = passed_on() | {"PYTHONPATH": path, "FOUNDRY_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=without, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    message = "belongs to the task robots, which is not installed here: model._target_="
    assert process.stdout.splitlines()[-1].startswith(f"run: policy/config.yaml {message}")
