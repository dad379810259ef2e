"""A sweep with an invalid job submits nothing to Slurm, for each kind of invalid job."""

import pytest
from cluster import SLURM
from support.wrong_sweeps import WRONG_SWEEPS, assert_said, write_options


@pytest.mark.long
@pytest.mark.slurm
def test_sweep_with_an_invalid_job_submits_nothing_to_slurm(cluster):
    write_options(cluster.cwd)
    files, before = set(cluster.cwd.rglob("*")), cluster.next_job_id()
    for name, (overrides, _) in WRONG_SWEEPS.items():
        cluster.finish(cluster.sweep(*SLURM, *overrides), code=2)
        assert_said(name, cluster.output)
    left = {path.name for path in set(cluster.cwd.rglob("*")) - files}
    assert left <= {"said.txt", f"slurm-{before}.out"}, "more files than next_job_id() creates"
    assert cluster.next_job_id() == before + 1
