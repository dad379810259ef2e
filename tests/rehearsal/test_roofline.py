"""Least time of a step: the bytes that enter a GPU by each way, and the largest of three bounds."""

import pytest
from support.records import collective, record

from foundry.rehearsal.roofline import least_time

GIB = 2**30


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "link", "network"),
    [
        ("all_gather", 8, 1, 7 / 8, 0),
        ("reduce_scatter", 8, 1, 7 / 8, 0),
        ("all_reduce", 8, 1, 2 * 7 / 8, 0),
        ("all_to_all", 8, 1, 7 / 8, 0),
        # 31 parts of 32 enter each node by eight network cards, and are passed on to the other seven ranks.
        ("all_gather", 256, 32, 7 / 8, 31 / 32 / 8),
        ("all_reduce", 256, 32, 2 * 7 / 8, 2 * 31 / 32 / 8),
        # Of 256 parts a rank gets 7 from its node and 248 from others.
        ("all_to_all", 256, 32, 7 / 256, 248 / 256),
        # A rank per node, as between the replicas of HSDP.
        ("all_reduce", 4, 4, 0, 2 * 3 / 4),
    ],
)
def test_bytes_enter_a_gpu_by_links_and_by_the_network(kind, ranks, nodes, link, network):
    step = collective(kind=kind, group_size=ranks, num_nodes=nodes, bytes=GIB)
    least = least_time(record(collectives=[step]), peak_flops=1.0, link_bandwidth=1.0, network_bandwidth=1.0)
    assert least.link_bytes == pytest.approx(link * GIB)
    assert least.network_bytes == pytest.approx(network * GIB)


def test_collectives_of_hosts_and_of_other_phases_take_no_time():
    others = [collective(device="cpu", bytes=GIB), collective(phase="step 1", bytes=GIB)]
    least = least_time(record(collectives=others), peak_flops=1.0, link_bandwidth=1.0, network_bandwidth=1.0)
    assert least.link_bytes == least.network_bytes == 0


@pytest.mark.parametrize(
    ("peak_flops", "link", "network", "limit", "seconds"),
    [
        (1e12, 1e12, 1e12, "arithmetic", 2.0),
        (1e15, 1e9, 1e12, "link", 7 / 8 * GIB / 1e9),
        (1e15, 1e12, 1e8, "network", 31 / 32 / 8 * GIB / 1e8),
        (None, 1e9, 1e12, "link", 7 / 8 * GIB / 1e9),
    ],
)
def test_the_least_time_is_the_largest_bound(peak_flops, link, network, limit, seconds):
    step = collective(kind="all_gather", group_size=256, num_nodes=32, bytes=GIB)
    rehearsed = record(collectives=[step], flops={"step 2": 2 * 10**12, "evaluating": 10**15})
    least = least_time(rehearsed, peak_flops=peak_flops, link_bandwidth=link, network_bandwidth=network)
    assert least.limit == limit
    assert least.seconds == pytest.approx(seconds)
