"""All commands of docs/slurm.md run as written."""

import subprocess

import pytest
from support.scripts import ROOT, load_script

PAGE = ROOT / "docs" / "slurm.md"

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def run_blocks():
    return load_script("run_blocks")


@pytest.mark.timeout(1200)
def test_commands_of_the_slurm_page_run_in_order(cluster, run_blocks, capfd):
    done = run_blocks.run(PAGE, at="slurm", environment=cluster.environment)
    assert done, capfd.readouterr().out


def test_gpu_example_of_the_slurm_page_lacks_only_its_partition(cluster, run_blocks):
    """The settings of the example are consistent: the missing partition is the only error."""
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
    assert message.stderr.startswith(
        "hydra.launcher.partition: is gpu, which is not a partition here; available partitions: main, "
    )
    assert message.stderr.count("\n") == 1
