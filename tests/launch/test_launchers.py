"""Launchers run jobs as composed, for foundry's sweeper and for other sweepers."""

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from support.composition import allowed_by_hydra

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.schemas.sweeper import Direction
from foundry.core.errors import ConfigError
from foundry.launch.job_state import JobState, Phase
from foundry.launch.launchers import FrozenLauncher
from foundry.run_dir.result import write_result
from foundry.run_dir.status import write_status
from foundry.sweeps.job import Job
from foundry.sweeps.plugins import register
from foundry.sweeps.sweeper import GridSweeper


class Recorder(FrozenLauncher):
    """A launcher that finishes each job at once with its number as the metric."""

    def submit(self, jobs):
        self.jobs = jobs
        for job in jobs:
            write_result(job.run_dir, {"metric": job.index})
            write_status(job.run_dir, state="finished")
        return {job.index: str(job.index) for job in jobs}

    def poll(self, ids):
        return {job_id: JobState(phase=Phase.ENDED) for job_id in ids}

    def cancel(self, ids, *, kill=False):
        pass

    def logs(self, job_id):
        return ""

    def wait(self, seconds):
        pass


@pytest.fixture
def launched(tmp_path):
    """A launcher, the file of an option `optimizer=mine`, and Hydra's context and configuration of the sweep."""
    install()
    options = tmp_path / "options" / "optimizer"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("defaults: [adamw, _self_]\nweight_decay: 0.5\n")
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        words = [f"hydra.searchpath=[{options.parent}]", f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.job.name=j"]
        master = loader.load_configuration(CONFIG_NAME, words, RunMode.MULTIRUN)
        context = HydraContext(config_loader=loader, callbacks=None)
        launcher = Recorder(work=lambda run_dir: 0)
        launcher.setup(hydra_context=context, task_function=None, config=master)
        yield launcher, options / "mine.yaml", context, master


def test_launcher_composes_checks_and_numbers_jobs_of_another_sweeper(launched):
    launcher, *_ = launched
    jobs = [("optimizer=mine", "hparams.seed=3"), ("optimizer=sgd", "hparams.seed=3")]
    returned = launcher.launch(jobs, 5)
    assert [job.config.optimizer.weight_decay for job in launcher.jobs] == [0.5, 0.01]
    assert [str(job) for job in launcher.jobs] == ["job 5 (optimizer=mine)", "job 6 (optimizer=sgd)"]
    assert [job.run_dir.name for job in launcher.jobs] == ["5", "6"]
    assert [job.return_value for job in returned] == [5, 6]
    assert "weight_decay: 0.5" in (launcher.jobs[0].run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"hparams\.leer"):
        launcher.launch([("hparams.leer=1",)], 7)


def test_grid_sweeper_hands_its_checked_configs_to_the_launcher(launched):
    launcher, option, context, master = launched
    sweeper = GridSweeper(
        params={},
        metric="val_loss",
        direction=Direction.minimize,
        max_jobs=9,
        max_batch_size=None,
        zip=[],
        exclude=[],
    )
    register()
    with allowed_by_hydra():
        sweeper.setup(hydra_context=context, task_function=None, config=master)
    sweeper.launcher = launcher
    (job,) = sweeper.prepare([Job(overrides=("optimizer=mine",), swept=())], sweeper.begin())
    option.write_text("defaults: [adamw, _self_]\nweight_decay: 0.9\n")
    sweeper.launch([job])
    assert launcher.jobs[0].config.optimizer.weight_decay == 0.5
    assert "weight_decay: 0.5" in (sweeper.run_dir(job) / "config.yaml").read_text()
