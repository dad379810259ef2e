"""Least time of a step: bytes that a GPU receives over links and network, and the largest of three bounds."""

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
        # 31/32 of the bytes enter each node through eight network cards and are forwarded to the other seven ranks.
        ("all_gather", 256, 32, 7 / 8, 31 / 32 / 8),
        ("all_reduce", 256, 32, 2 * 7 / 8, 2 * 31 / 32 / 8),
        # Of 256 parts, a rank receives 7 from its node and 248 from other nodes.
        ("all_to_all", 256, 32, 7 / 256, 248 / 256),
        # One rank per node, as between HSDP replicas.
        ("all_reduce", 4, 4, 0, 2 * 3 / 4),
    ],
)
def test_collective_bytes_are_split_into_link_and_network(kind, ranks, nodes, link, network):
    step = collective(kind=kind, group_size=ranks, num_nodes=nodes, bytes=GIB)
    least = least_time(record(collectives=[step]), peak_flops=1.0, link_bandwidth=1.0, network_bandwidth=1.0)
    assert least.link_bytes == pytest.approx(link * GIB)
    assert least.network_bytes == pytest.approx(network * GIB)


def test_host_collectives_and_other_phases_are_excluded():
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
def test_least_time_is_the_largest_bound(peak_flops, link, network, limit, seconds):
    step = collective(kind="all_gather", group_size=256, num_nodes=32, bytes=GIB)
    rehearsed = record(collectives=[step], flops={"step 2": 2 * 10**12, "evaluating": 10**15})
    least = least_time(rehearsed, peak_flops=peak_flops, link_bandwidth=link, network_bandwidth=network)
    assert least.limit == limit
    assert least.seconds == pytest.approx(seconds)
