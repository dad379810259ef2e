"""An untrusted run directory whose simulator settings name code."""

import sys
from contextlib import suppress
from importlib.util import find_spec

import pytest
import yaml
from support.composition import configure

from foundry.config.record.frozen import load_config, save_config
from foundry.core.errors import ConfigError
from foundry.parts.data import build_simulator

if find_spec("gymnasium_robotics") is None:
    pytest.skip("needs the extra fetch", allow_module_level=True)

FOREIGN = {
    "id": "theirs:Arm-v0",
    "import_module": "theirs",
    "expert": "theirs.expert",
    "kwargs": {"env_id": "theirs:Arm-v0"},
}


@pytest.fixture
def write(tmp_path):
    """A function that writes the config of a run with changed simulator settings and returns the run directory."""

    def write(simulator="fetch_push", **settings):
        save_config(configure(f"simulator={simulator}"), tmp_path)
        content = yaml.safe_load((tmp_path / "config.yaml").read_text())
        content["simulator"] |= settings
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        return tmp_path

    return write


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    """A module that creates the file `canary` on import."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\ndef expert(state): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("theirs", None)


@pytest.mark.parametrize("simulator", ["around", "push", "touch", "fetch_push", "fetch_pick_and_place"])
def test_built_in_simulators_load_without_trust(write, simulator):
    assert load_config(write(simulator)) == configure(f"simulator={simulator}")


@pytest.mark.parametrize("name", FOREIGN)
def test_simulator_settings_that_import_code_require_trust(write, tmp_path, name):
    run_dir = write(**{name: FOREIGN[name]})
    with pytest.raises(ConfigError) as refused:
        load_config(run_dir)
    assert f"simulator.{name}=" in str(refused.value)
    assert "trust=true" in str(refused.value)
    config = load_config(run_dir, trust=True)
    assert not (tmp_path / "canary").exists()
    if name != "kwargs":  # not an argument of Fetch environments
        with suppress(ConfigError):  # the module registers no environment
            build_simulator(config.simulator)
        assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("target", ["theirs.Arm", "foundry.simulators.gymnasium._make"])
def test_foreign_simulator_target_requires_trust(write, tmp_path, target):
    run_dir = write("around", _target_=target)
    with pytest.raises(ConfigError) as refused:
        load_config(run_dir)
    assert f"simulator._target_={target}" in str(refused.value)
    assert not (tmp_path / "canary").exists()
