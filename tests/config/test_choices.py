"""Compositions cached by config group choices equal Hydra's compositions."""

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf
from support.examples import some_of

from foundry import compose
from foundry.config.composition.choices import Choices
from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_internals import load_unchecked
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError

OVERRIDES = [
    [],
    ["hparams.lr=0.001", "hparams.lr=0.002"],
    ["scheduler=wsd", "scheduler.decay=0.2"],
    ["optimizer.weight_decay=0.3", "optimizer=adamw"],
    ["hparams=diffusion", "model.num_layers=1"],
    ["experiment=digits_epsilon"],
    ["model=hf", "+model.config={hidden_size: 32}", "++model.config.extra=[1,2]"],
    ["~debug", "scheduler.warmup='0.1'"],
    ["hydra.run.dir=here", "hydra.job.name=mine", "hydra.job.config.override_dirname.item_sep='/'", "hparams.seed=3"],
    ["+hydra.job.env_set.A=b", "hydra.job.env_copy=[HOME]"],
]
REFUSED = [
    ["hparams.leer=1"],
    ["hparams.lr=abc"],
    ["scheduler=wds"],
    ["hparams.seed=1,2"],
    ["hparams.lr"],
    ["+scheduler=wsd"],
    ["hparams@model=default"],
    ["~hparams.no"],
    ["hydra.searchpath=7"],
]


@pytest.fixture(autouse=True)
def kept_choices():
    """Override the fixture of all tests: compositions in this file do not use the shared cache of choices."""


@pytest.fixture(scope="module")
def loader():
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        yield GlobalHydra.instance().config_loader()


@pytest.fixture(scope="module")
def loads(loader):
    """Return `composed(overrides)`, and a list of the overrides that it passed to Hydra."""
    calls, choices = [], Choices()

    def load(overrides):
        calls.append(overrides)
        return load_unchecked(loader, CONFIG_NAME, overrides)

    def composed(overrides):
        return choices.compose(load, loader, CONFIG_NAME, overrides, RunMode.RUN)

    composed([])
    return composed, calls


@pytest.mark.parametrize("overrides", some_of(OVERRIDES, *OVERRIDES[::3]), ids=" ".join)
def test_cached_composition_equals_the_composition_by_hydra(loader, loads, overrides):
    composed, calls = loads
    composed([*overrides, "hparams.max_steps=7"])
    calls.clear()
    shared = composed(overrides)
    assert calls == []
    expected = load_unchecked(loader, CONFIG_NAME, overrides)
    assert OmegaConf.to_yaml(shared) == OmegaConf.to_yaml(expected)
    assert to_config(shared) == to_config(expected)
    assert OmegaConf.is_struct(shared.hparams) == OmegaConf.is_struct(expected.hparams)


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_cached_composition_raises_the_same_error_as_hydra(loader, loads, overrides):
    composed, _ = loads
    with pytest.raises(Exception, match=r".") as expected:
        load_unchecked(loader, CONFIG_NAME, overrides)
    with pytest.raises(type(expected.value)) as shared:
        composed(overrides)
    assert str(shared.value) == str(expected.value)
    assert str(shared.value.__cause__) == str(expected.value.__cause__)


def test_mutating_a_composition_does_not_affect_the_next(loads):
    composed, _ = loads
    composed([]).hparams.lr = 7.0
    assert composed([]).hparams.lr != 7.0


def test_cached_composition_has_the_current_working_directory(loads, monkeypatch, tmp_path):
    composed, _ = loads
    composed([])
    monkeypatch.chdir(tmp_path)
    assert composed([]).hydra.runtime.cwd == str(tmp_path)


def test_cached_composition_has_the_name_of_its_own_job(tmp_path):
    install()
    GlobalHydra.instance().clear()
    (tmp_path / "other.yaml").write_text("a: 1\n")
    names, choices = [], Choices()
    with choices.used():
        for name, *overrides in (["first"], ["first"], ["second"], ["third", "hydra.job.name=first"]):
            with initialize_config_dir(str(tmp_path), job_name=name, **VERSION_BASE):
                loader = GlobalHydra.instance().config_loader()
                names.append(loader.load_configuration("other", overrides, RunMode.RUN).hydra.job.name)
    assert names == ["first", "first", "second", "first"]
    assert len(choices._pickled) == 1


def test_refused_composition_loads_its_options_twice(monkeypatch):
    """Hydra refuses the first load; a second one serves all compositions that find the errors."""
    install()
    reads = []
    original = Choices.compose

    def counted(self, load, *arguments):
        return original(self, lambda overrides: reads.append(overrides) or load(overrides), *arguments)

    monkeypatch.setattr(Choices, "compose", counted)
    with pytest.raises(ConfigError) as refused:
        compose(["scheduler=wsd", "hparams.leer=1", "hparams.seed=x", "hparams.lr=-1"])
    assert len(refused.value.violations) == 3
    assert len(reads) == 2


@pytest.mark.long
def test_library_compose_rereads_an_option_file_after_an_edit(tmp_path):
    option = tmp_path / "scheduler" / "mine.yaml"
    option.parent.mkdir()
    for decay in ("0.1", "0.2"):
        option.write_text(f"defaults: [wsd, _self_]\ndecay: '{decay}'\n")
        for _ in range(2):
            assert compose(["scheduler=mine"], config_dir=tmp_path).scheduler.decay == decay
        option.write_text("defaults: [wsd, _self_]\ndecya: 3\n")
        with pytest.raises(ConfigError, match="decya"):
            compose(["scheduler=mine"], config_dir=tmp_path)
