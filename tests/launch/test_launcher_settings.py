"""Composition refuses invalid launcher settings."""

import re
from dataclasses import fields

import pytest
from hydra import compose, initialize_config_dir
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.schemas.launcher import SubmititSlurm, resolve_launcher
from foundry.core.errors import ConfigError

NAMED = ["hydra.launcher.name=a", "hydra.launcher.submitit_folder=a"]  # the defaults resolve only in runs
BATCH = ["hparams.per_gpu_batch_size=2", "hparams.global_batch_size=16"]


def composed(*overrides):
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        return compose(CONFIG_NAME, [*overrides, *BATCH], return_hydra_config=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["signal_delay_s=60", "timeout_min=1"], "signal_delay_s: is 60 but the time limit of 1 min is not longer"),
        (["gpus_per_node=8"], "gpus_per_node: is 8 but tasks_per_node is 1, and each task trains on one GPU"),
        (["gpus_per_task=2"], "gpus_per_task: is 2 but must be at most 1"),
        (["cpus_per_gpu=4"], "cpus_per_gpu: is set but requires gpus_per_task=1"),
        (["mem_gb=4", "mem_per_cpu=2G"], "mem_per_cpu: is set together with mem_gb; choose one of them"),
        (["nodes=3"], "must be a multiple of per_gpu_batch_size 2 x 3 ranks = 6; nearest: 12 or 18"),
        (["submitit_folder=out/%A_%a"], "is out/%A_%a, which has %a, but one job alone is not an array; use %j"),
        (["partitoin=main"], "did you mean hydra.launcher.partition?"),
    ],
)
def test_invalid_slurm_launcher_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        composed("hydra/launcher=slurm", *(f"hydra.launcher.{word}" for word in overrides))
    assert message in str(caught.value)


def test_slurm_launcher_refuses_nproc_per_node():
    with pytest.raises(ConfigError, match=r"Slurm starts the processes; set hydra.launcher.tasks_per_node instead"):
        composed("hydra/launcher=slurm", "distributed.nproc_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["submitit_slurm", "timeout_min=2"], "signal_delay_s: is 120 but the time limit of 2 min is not longer than"),
        (["submitit_slurm", "gpus_per_node=8"], "gpus_per_node: is 8 but tasks_per_node is 1, and each task trains on"),
        (
            ["submitit_slurm", "+use_srum=false"],
            "use_srum: is not a key of hydra.launcher",
        ),
        (["submitit_slurm", "nodes=3"], "must be a multiple of per_gpu_batch_size 2 x 3 ranks = 6; nearest: 12 or 18"),
        (
            ["submitit_local", "nodes=2"],
            "nodes: is 2 but submitit_local uses only this machine; choose hydra/launcher=sl",
        ),
        (
            ["submitit_local", "mem_gb=4"],
            "mem_gb: is 4 but submitit_local does not limit memory; leave it out, or choose",
        ),
        (
            ["submitit_local", "gpus_per_node=2"],
            "gpus_per_node: is 2 but a job has 1 rank with one GPU each; set it to 1",
        ),
        (
            ["submitit_local", "tasks_per_node=3"],
            "must be a multiple of per_gpu_batch_size 2 x 3 ranks = 6; nearest: 12",
        ),
        (["submitit_local", "tasks_per_node=0"], "tasks_per_node: is 0 but must be at least 1"),
        (["submitit_local", "name=${gone}"], "hydra.launcher.name: "),
    ],
)
def test_invalid_submitit_launcher_settings_are_refused(overrides, message):
    launcher, *settings = overrides
    words = [re.sub(r"^(\+*)", r"\1hydra.launcher.", word) for word in settings]
    with pytest.raises(ConfigError) as caught:
        composed(f"hydra/launcher={launcher}", *words)
    assert message in str(caught.value)


def test_submitit_launcher_settings_have_the_defaults_of_the_plugin():
    slurm = resolve_launcher(composed("hydra/launcher=submitit_slurm", "hydra.launcher.partition=a", *NAMED))
    assert (slurm.max_num_timeout, slurm.signal_delay_s, slurm.partition) == (0, 120, "a")
    assert not {item.name for item in fields(SlurmQueueConf)} - {item.name for item in fields(slurm)}
    local = resolve_launcher(composed("hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", *NAMED))
    assert (local.timeout_min, local.tasks_per_node) == (60, 2)
    assert {item.name for item in fields(LocalQueueConf)} == {item.name for item in fields(local)}


def test_settings_of_a_newer_plugin_are_refused():
    (violation,) = SubmititSlurm(use_srun=False).check(1)
    assert str(violation) == (
        "hydra.launcher.use_srun: is False, which foundry's launcher does not support; leave it out"
    )
    assert not list(SubmititSlurm().check(1))


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [
        ("slurm", "set hydra.launcher.array_parallelism=2"),
        ("kubernetes", "set hydra.launcher.queue to a queue of Kueue with a quota"),
    ],
)
def test_detached_sweep_refuses_max_batch_size(launcher, remedy):
    words = [f"hydra/launcher={launcher}", "hydra.mode=MULTIRUN", "hydra.sweeper.max_batch_size=2"]
    words += ["hydra.launcher.image=foundry:1"] if launcher == "kubernetes" else NAMED
    detach = "hydra.launcher.detach=true"
    with pytest.raises(ConfigError) as caught:
        composed(*words, detach)
    assert str(caught.value) == (
        "hydra.sweeper.max_batch_size: is 2 but hydra.launcher.detach=true submits all jobs and waits for none; leave "
        f"it out, and {remedy}"
    )
    composed(*words)
    composed(*[word for word in words if "max_batch_size" not in word], detach)


def test_single_run_refuses_a_sweep_launcher():
    for name in ("local", "submitit_local", "submitit_slurm"):
        with pytest.raises(ConfigError, match=f"hydra/launcher: is {name}, which starts the jobs of a sweep; add -m"):
            composed(f"hydra/launcher={name}", "hydra.mode=RUN")


def test_accum_freq_follows_from_the_tasks_of_the_launcher():
    assert composed("hydra/launcher=slurm").hparams.accum_freq == 8
    overrides = ["hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2"]
    assert composed("hydra/launcher=slurm", *overrides).hparams.accum_freq == 2
    assert composed("hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2").hparams.accum_freq == 4
    assert composed("hydra/launcher=local", "distributed.nproc_per_node=2").hparams.accum_freq == 4
