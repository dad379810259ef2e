"""Every command of docs/slurm.md runs as it is written there."""

import subprocess

import pytest
from support.scripts import ROOT, load_script

PAGE = ROOT / "docs" / "slurm.md"

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def run_blocks():
    return load_script("run_blocks")


@pytest.mark.timeout(1200)
def test_the_page_runs_from_top_to_bottom(cluster, run_blocks, capfd):
    done = run_blocks.run(PAGE, at="slurm", environment=cluster.environment)
    assert done, capfd.readouterr().out


def test_of_the_job_with_gpus_only_the_partition_is_missing_here(cluster, run_blocks):
    """Its settings fit together; what it lacks is the cluster."""
    own = run_blocks.blocks(PAGE.read_text())
    (code,) = (block for block in run_blocks.blocks(PAGE.read_text(), at="elsewhere") if block not in own)
    (cluster.cwd / "text").mkdir()
    message = subprocess.run(
        ["bash", "-c", code.replace("/shared", str(cluster.cwd))],
        cwd=cluster.cwd,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert message.returncode == 2
    assert message.stderr.startswith("hydra.launcher.partition: is gpu, which is not here; partitions here: main, ")
    assert message.stderr.count("\n") == 1
