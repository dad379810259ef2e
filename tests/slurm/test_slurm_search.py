"""A search whose jobs run on a real Slurm."""

import pytest
from cluster import SLURM

from foundry.run_dir.study_storage import open_storage

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def trials(sweep):
    optuna = pytest.importorskip("optuna")
    return optuna.load_study(study_name="search", storage=open_storage(sweep / "optuna.jsonl")).get_trials()


def test_restarted_search_finds_its_jobs_in_the_slurm_queue(cluster):
    """Run two jobs at a time; kill the search process while they run, and start it again."""
    overrides = [
        *SLURM,
        *["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=3"],
        *["hparams.max_steps=400", "hparams.lr=tag(log,interval(1e-4,1e-1))"],
    ]
    killed = cluster.sweep(*overrides)
    cluster.wait_for_steps(0, 2)
    cluster.wait_for_steps(1, 2)
    killed.kill()
    killed.wait()
    submitted = [cluster.slurm_id(job) for job in (0, 1)]
    cluster.finish(cluster.sweep(*overrides))
    assert "is already in the queue as " in cluster.output
    assert [cluster.slurm_id(job) for job in (0, 1)] == submitted
    assert [trial.state.name for trial in trials(cluster.cwd / "s")] == ["COMPLETE"] * 3
    assert [cluster.status(job) for job in range(3)] == [("finished", "")] * 3
