"""Checks apply to every primary config that uses foundry's schemas, and not to configs of other applications."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.utils import create_config_search_path
from omegaconf import OmegaConf
from support.examples import some_of

from foundry.config.composition import compose as composing
from foundry.config.composition.compose import config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError

SEARCHPATH = f"hydra: {{searchpath: ['file://{config_dir()}']}}\n"
OWN = {
    "alone": "defaults: [config, _self_]\nhparams: {seed: 7}\n",
    "override": "defaults: [config, override /optimizer: muon, _self_]\nhparams: {seed: 7}\n",
    "self-first": "defaults: [_self_, config]\n",
    "by-hand": "defaults: [base_config, {optimizer: adamw}, {scheduler: cosine}, {model: transformer}, {data: stdlib}, "
    "{objective: next_token}, {hparams: llm}, _self_]\n",
}
WRONG = [
    (["scheduler.min_lr=1"], "scheduler.min_lr: is 1 but hparams.lr is only"),
    (["hparams.grad_clip_norm=-1"], "hparams.grad_clip_norm: is -1 but must be above 0"),
    (["hparams.leer=1"], "did you mean hparams.lr?"),
]


def compose_own(folder: Path, name: str, *overrides: str):
    install()
    with initialize_config_dir(str(folder), **VERSION_BASE):
        return hydra_compose(name, list(overrides))


@pytest.mark.parametrize("name", some_of(OWN, "override", "by-hand"))
def test_custom_primary_config_is_checked(name, tmp_path):
    (tmp_path / "own.yaml").write_text(OWN[name] + SEARCHPATH)
    assert to_config(compose_own(tmp_path, "own")).hparams.seed in (7, 42)
    for overrides, message in WRONG:
        with pytest.raises(ConfigError) as refused:
            compose_own(tmp_path, "own", *overrides)
        assert message in str(refused.value)


def test_error_in_a_primary_config_names_file_and_key(tmp_path):
    (tmp_path / "own.yaml").write_text(f"defaults: [config, _self_]\nhparams: {{learning_rate: 1}}\n{SEARCHPATH}")
    with pytest.raises(ConfigError, match=r"own\.yaml: hparams\.learning_rate: .*; write hparams\.lr=1$"):
        compose_own(tmp_path, "own")


@pytest.mark.parametrize("name", ["config", "own", "other"])
def test_configs_of_other_applications_are_not_checked(name, tmp_path):
    (tmp_path / f"{name}.yaml").write_text(f"hparams: {{lr: -1}}\nscheduler: {{min_lr: 1}}\n{SEARCHPATH}")
    assert compose_own(tmp_path, name, "hparams.lr=-2").hparams.lr == -2
    with pytest.raises(Exception, match="nope") as refused:
        compose_own(tmp_path, name, "nope=1")
    assert not isinstance(refused.value, ConfigError)


def foundry(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foundry", *overrides],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


COMMANDS = [
    (["--config-dir", "mine", "--config-name", "own"], "grad_clip_norm: is -1"),
    (["--config-path", "{folder}", "--config-name", "own", "--cfg", "job"], "grad_clip_norm: is -1"),
    (["-m", "--config-dir", "mine", "--config-name", "own", "hparams.seed=1,2"], "grad_clip_norm: is -1"),
    (["--config-dir", "mine", "--config-name", "foreign", "--cfg", "job"], "defaults: [config, _self_]"),
    (["--config-dir", "mine", "--config-name", "onw", "--cfg", "job"], "did you mean own?"),
]


@pytest.mark.long
@pytest.mark.parametrize(("overrides", "message"), COMMANDS, ids=[" ".join(overrides) for overrides, _ in COMMANDS])
def test_command_checks_a_custom_primary_config(overrides, message, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "own.yaml").write_text("defaults: [config, _self_]\nhparams: {grad_clip_norm: -1}\n")
    (mine / "foreign.yaml").write_text("hparams: {grad_clip_norm: -1}\n")
    done = foundry(*[word.format(folder=mine) for word in overrides], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_command_composes_a_valid_custom_primary_config(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults: [config, override /optimizer: muon, _self_]\nhparams: {seed: 7}\n")
    done = foundry("--config-path", str(tmp_path), "--config-name", "own", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    composed = OmegaConf.create(done.stdout)
    assert composed.hparams.seed == 7
    assert composed.optimizer._target_.endswith("muon")


@pytest.mark.parametrize("has_own_path", [True, False])
def test_options_of_the_user_precede_those_of_foundry_and_those_of_tasks_are_last(tmp_path, monkeypatch, has_own_path):
    tasks = [SimpleNamespace(name="own", config_dir=tmp_path / "task"), SimpleNamespace(name="other", config_dir=None)]
    monkeypatch.setattr(composing, "installed_tasks", lambda: tasks)
    search_path = create_config_search_path(str(tmp_path) if has_own_path else config_dir())
    composing._OptionFolders().manipulate_search_path(search_path)
    folders = [element.path.removeprefix("file://") for element in search_path.get_path()]
    own = [str(tmp_path)] if has_own_path else []
    assert [folder for folder in folders if Path(folder).is_absolute()] == [*own, config_dir(), str(tmp_path / "task")]
