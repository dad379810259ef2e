"""All process groups of a process have the time limit of the run."""

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
def test_mesh_and_side_groups_have_the_time_limit_of_the_run():
    for groups in run_ranks(limits_of_groups, 2):
        assert {seconds for _, each in groups for seconds in each} == {125.0}  # watchdog's limit plus a quarter
        assert len(groups) >= 3  # All ranks, mesh dimensions and side group.
