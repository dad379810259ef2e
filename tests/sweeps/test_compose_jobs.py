"""compose_jobs returns the configurations that Hydra composes, or the errors of each job."""

from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.examples import examples, some_of

from foundry.config.checks.group_checks import GroupCheck, GroupChecks
from foundry.config.composition.hydra_internals import load_unchecked
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


VALUES = {
    "hparams.lr": [
        "1e-3",
        "1",
        "1.0",
        "'1'",
        "0.0",
        "-0.0",
        "-1",
        "x",
        "null",
        "true",
        "nan",
        "[1]",
        "${hparams.min_lr}",
    ],
    "hparams.min_lr": ["0", "1e-5", "${hparams.lr}", "${times:0.5,${hparams.lr}}", "${nope}", "${hparams}"],
    "hparams.seed": ["1", "2", "-1", "${hparams.max_steps}"],
    "hparams.max_steps": ["9", "null", "0", "${data.seq_len}"],
    "hparams.global_batch_size": ["8", "10", "${hparams.per_gpu_batch_size}", "${where:peft.method,lora,8,16}"],
    "hparams.loss_function": ["mse", "cross_entropy"],
    "model.hidden_size": ["64", "65", "'64'", "${data.seq_len}"],
    "model.init_from": ["null", "nowhere", "${data.path}"],
    "data.seq_len": ["64", "128", "${model.max_seq_len}", "${half:${hparams.seed}}"],
    "data.path": ["[a,b]", "'a, b'", "nowhere", "."],
    "scheduler.warmup": ["'0.1'", "0.1", "2", "${hparams.max_steps}"],
    "optimizer.betas": ["[0.9,0.95]", "[0.9]", "[0,1]", "null"],
    "optimizer.momentum": ["0.5", "${hparams.lr}"],
    "precision.mode": ["bf16", "fp32", "fp8"],
    "tracking.run_name": ["'a, b'", "lr-${hparams.lr}", "'${hparams.seed}'", "ghp_aaaaaaaaaaaaaaaaaaaaaaaa", "''"],
    "tracking.uri": ["https://user:password@host", "'${tracking.run_name}'", "runs"],
    "evaluation.metric": ["val_loss", "loss", "null"],
    "evaluation.interval": ["10", "null", "1.5"],
    "evaluation.evaluators.mine": ["{_target_: nowhere.X}", "null", "{metrics: ['${hparams.lr}']}"],
    "checkpoint.resume": ["auto", "never", "runs/${hparams.seed}"],
    "hydra.job.chdir": ["true", "false"],
    "hydra.sweep.subdir": ["'${hparams.seed}'", "'${nope}'"],
    "hparams.leer": ["1", "2"],
    "nonsense": ["1"],
}
OPTIONS = {
    "optimizer": ["adamw", "sgd", "sdg", "null"],
    "scheduler": ["wsd", "wds"],
    "hparams": ["llm", "diffusion"],
    "peft": ["lora", "none"],
    "model": ["hf_gpt2", "base", "[transformer]"],
    "debug": ["fast", "null"],
    "experiment": ["digits_epsilon"],
}

jobs_of_sweeps = st.lists(
    st.lists(
        st.one_of(
            [st.sampled_from([f"{key}={value}" for value in values]) for key, values in VALUES.items()]
            + [st.sampled_from([f"{group}={option}" for option in options]) for group, options in OPTIONS.items()]
            + [
                st.builds(
                    "{}{}={}".format,
                    st.sampled_from(["+", "++"]),
                    st.sampled_from(["hparams.lr", "hparams.new", "evaluation.evaluators.mine", "evaluation.new"]),
                    st.sampled_from(["1", "1.0", "'1'", "{a: 1}", "[1]", "${hparams.lr}"]),
                ),
                st.sampled_from(["~debug", "~hparams.seed", "~evaluation.evaluators", "~optimizer", "~nonsense"]),
            ]
        ),
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


LOADED = {}
"""Compositions of options, which the examples of a test share."""


def load_once(loader, config_name, overrides):
    """Compose overrides as `load_unchecked` does, once for all examples."""
    if (key := tuple(overrides)) not in LOADED:
        LOADED[key] = load_unchecked(loader, config_name, overrides)
    return LOADED[key]


def outcomes(loader, master, jobs):
    """Return for each job its errors, or everything that can be read from its configuration."""
    with patch.dict("foundry.run_dir.redact._secrets", clear=True):
        return [
            [(violation.key, violation.message) for violation in result.violations]
            if isinstance(result, ConfigError)
            else (repr(result), OmegaConf.to_yaml(result), repr(to_config(result)))
            for result in compose_jobs(loader, master, jobs)
        ]


@settings(derandomize=True, max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fixed=st.lists(st.sampled_from(["hparams.max_steps=9", "debug=fast", "optimizer=sgd", "hparams.min_lr=1e-5"])),
    swept=jobs_of_sweeps,
)
def test_jobs_of_a_sweep_are_checked_as_each_job_by_itself(sweep, monkeypatch, fixed, swept):
    """The last job equals the first, so that all its groups are in the cache."""
    loader, master_of = sweep
    master = master_of()
    monkeypatch.setattr("foundry.sweeps.compose_jobs.load_unchecked", load_once)
    jobs = [(*fixed, *words) for words in [*swept, swept[0]]]
    with patch.object(GroupChecks, "check", lambda self, composed, name: GroupCheck(composed, name)):
        expected = outcomes(loader, master, jobs)
    assert outcomes(loader, master, jobs) == expected


def test_jobs_with_equal_groups_share_their_checks(sweep):
    """Of 20 jobs with two rates, each rate is checked once, and the groups that do not read it are checked once."""
    loader, master_of = sweep
    checks = GroupChecks()
    jobs = [(f"hparams.lr={rate}", "hparams.max_steps=9") for rate in (1e-3, 2e-3) * 10]
    with patch("foundry.sweeps.compose_jobs.GroupChecks", lambda: checks):
        compose_jobs(loader, master_of(), jobs)
    names = [key[0] for key in checks._checks]
    assert (names.count("hparams"), names.count("model"), names.count("data")) == (2, 1, 1)
