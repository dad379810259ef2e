"""compose_jobs returns the configurations that Hydra composes, or the errors of each job."""

import pytest
from omegaconf import OmegaConf
from support.examples import some_of

from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError
from foundry.sweeps.compose_jobs import compose_jobs

JOBS = [
    (),
    ("hparams.lr=0.001", "hparams.max_steps=7"),
    ("optimizer=sgd", "hparams.lr=0.01", "optimizer.momentum=0.5"),
    ("optimizer.weight_decay=0.3", "optimizer=adamw"),
    ("hparams=diffusion", "scheduler=wsd", "scheduler.decay=0.2", "experiment=digits_epsilon"),
    ("experiment=digits_epsilon", "model.num_layers=1"),
    ("debug=fast", "hparams.max_steps=9", "data.seq_len=64"),
    ("model=hf", "+model.config={hidden_size:32}", "+model.config.extra=[1,2]"),
    ("hparams.lr=1e-3", "hparams.lr=2e-3"),
    ("scheduler.warmup='0.1'", "tracking.run_name='a, b'"),
]


@pytest.mark.parametrize("words", some_of(JOBS, *JOBS[::3]), ids=" ".join)
def test_compose_jobs_equals_composition_by_hydra(sweep, words):
    loader, master_of = sweep
    master = master_of("hydra.mode=MULTIRUN", "hydra.sweep.dir=${now:%f}", "+hydra.job.env_set.A=b")
    time_of_the_sweep = master.hydra.sweep.dir
    (config,) = compose_jobs(loader, master, [words])
    expected = loader.load_sweep_config(master, list(words))
    assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(expected)
    assert config.hydra.sweep.dir == expected.hydra.sweep.dir == time_of_the_sweep
    assert to_config(config) == to_config(expected)
    assert OmegaConf.is_struct(config.hparams) == OmegaConf.is_struct(expected.hparams)


def test_compose_jobs_finds_options_of_the_searchpath(sweep, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("# @package hparams\nlr: 0.125\n")
    loader, master_of = sweep
    master = master_of(f"hydra.searchpath=[{tmp_path}]", "hydra.mode=MULTIRUN")
    (config,) = compose_jobs(loader, master, [("+mine=a", "hparams.seed=3")])
    assert (config.hparams.lr, config.hparams.seed) == (0.125, 3)
    assert config.hydra.runtime.choices.mine == "a"


def test_fixed_setting_may_exist_in_swept_options_only(sweep):
    """AdamW, the default optimizer here, has no momentum."""
    loader, master_of = sweep
    fixed = ("hparams=diffusion", "optimizer.momentum=0.85", "hparams.seed=7")
    master = master_of("optimizer=sgd,muon,adamw", *fixed)
    assert list(master.hydra.overrides.task) == ["optimizer=sgd,muon,adamw", *fixed]
    assert master.hparams.seed == 7
    jobs = [(f"optimizer={option}", *fixed) for option in ("sgd", "muon", "adamw")]
    *good, bad = compose_jobs(loader, master, jobs)
    assert [config.optimizer.momentum for config in good] == [0.85, 0.85]
    assert [violation.key for violation in bad.violations] == ["optimizer.momentum"]
    with pytest.raises(ConfigError, match=r"optimizer\.momentum: is not a setting of the chosen optimizer"):
        master_of("hparams.lr=1e-3,2e-3", *fixed)


def test_compose_jobs_returns_all_errors_of_an_invalid_job(sweep):
    loader, master_of = sweep
    good, bad = compose_jobs(loader, master_of(), [("hparams.seed=1",), ("hparams.leer=1", "scheduler=wds")])
    assert good.hparams.seed == 1
    assert isinstance(bad, ConfigError)
    assert {violation.key for violation in bad.violations} == {"hparams.leer", "scheduler"}


def test_composed_jobs_share_no_mutable_state(sweep):
    loader, master_of = sweep
    words = [(f"hparams.seed={seed}", f"scheduler.warmup='{seed}'") for seed in (1, 2, 3)]
    configs = compose_jobs(loader, master_of(), words)
    assert [(config.hparams.seed, config.scheduler.warmup) for config in configs] == [(1, "1"), (2, "2"), (3, "3")]


def test_compose_jobs_reads_options_once_per_choice(sweep, option_reads):
    loader, master_of = sweep
    jobs = [("hparams.max_steps=9", f"hparams.seed={seed}") for seed in range(100)]
    assert len(compose_jobs(loader, master_of(), jobs)) == 100
    assert len(option_reads) == 1
