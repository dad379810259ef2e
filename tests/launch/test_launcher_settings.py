"""Wrong settings of a launcher are refused while the configuration is composed."""

import pytest
from hydra import compose, initialize_config_dir

from foundry.config.compose import CONFIG_NAME, config_dir, install
from foundry.config.errors import ConfigError

BATCH = ["hparams.per_gpu_batch_size=2", "hparams.global_batch_size=16"]


def composed(*overrides):
    install()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return compose(CONFIG_NAME, [*overrides, *BATCH], return_hydra_config=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["signal_delay_s=60", "timeout_min=1"], "signal_delay_s: is 60 but the time limit of 1 min is no longer"),
        (["gpus_per_node=8"], "gpus_per_node: is 8 but tasks_per_node is 1, and each task trains on one GPU"),
        (["gpus_per_task=2"], "gpus_per_task: is 2 but must be at most 1"),
        (["cpus_per_gpu=4"], "cpus_per_gpu: is set but needs gpus_per_task=1"),
        (["mem_gb=4", "mem_per_cpu=2G"], "mem_per_cpu: is set together with mem_gb; choose one of them"),
        (["nodes=3"], "must be a multiple of per_gpu_batch_size 2 x 3 ranks = 6; nearest: 12 or 18"),
        (["partitoin=main"], "did you mean hydra.launcher.partition?"),
    ],
)
def test_slurm(overrides, message):
    with pytest.raises(ConfigError) as caught:
        composed("hydra/launcher=slurm", *(f"hydra.launcher.{word}" for word in overrides))
    assert message in str(caught.value)


def test_slurm_starts_the_processes_itself():
    with pytest.raises(ConfigError, match=r"Slurm starts the processes; give hydra.launcher.tasks_per_node that"):
        composed("hydra/launcher=slurm", "distributed.nproc_per_node=2")


def test_a_launcher_of_a_sweep_is_not_ignored_by_a_single_run():
    with pytest.raises(ConfigError, match="hydra/launcher: is local, which starts the jobs of a sweep; add -m"):
        composed("hydra/launcher=local", "hydra.mode=RUN")


def test_accumulation_follows_from_the_tasks_of_the_job():
    assert composed("hydra/launcher=slurm").hparams.accum_freq == 8
    overrides = ["hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2"]
    assert composed("hydra/launcher=slurm", *overrides).hparams.accum_freq == 2
    assert composed("hydra/launcher=local", "distributed.nproc_per_node=2").hparams.accum_freq == 4
