"""Every process group of a process has the run's time limit, whoever made it."""

import pytest
from support.group_limits import limits
from support.harness import run_ranks

from foundry.config.schemas.distributed import HSDP


def limits_of_groups(world):
    from foundry.parallel.process_group import arrange, limit_waits, side_group

    arrange(world, HSDP(num_replicas=2))
    side_group(world)
    limit_waits(100.0)
    return limits()


@pytest.mark.distributed
def test_groups_of_a_mesh_and_beside_it_have_the_limit():
    for groups in run_ranks(limits_of_groups, 2):
        assert {seconds for _, each in groups for seconds in each} == {125.0}  # a quarter more than the watchdog's
        assert len(groups) >= 3  # the ranks, those of a dimension of the mesh, and those beside
