"""Least time of a rehearsed step, from the peak rates in the device's data sheet."""

from dataclasses import dataclass

from foundry.rehearsal.record import Collective, RehearsalRecord


@dataclass(frozen=True, kw_only=True)
class LeastTime:
    """Lower bounds of the duration of a step. Arithmetic and both kinds of traffic may overlap, so the largest counts.

    Attributes:
        flops: floating-point operations of this rank.
        peak_flops: peak FLOP/s of the device; None if unknown.
        link_bytes: bytes that this rank receives from ranks of its node.
        link_bandwidth: bytes per second into a GPU from its node.
        network_bytes: bytes that this rank receives from other nodes.
        network_bandwidth: bytes per second into a GPU from other nodes.
    """

    flops: int
    peak_flops: float | None
    link_bytes: float
    link_bandwidth: float
    network_bytes: float
    network_bandwidth: float

    @property
    def seconds_by_limit(self) -> dict[str, float]:
        """Seconds of arithmetic (if its peak is known), of links and of the network."""
        arithmetic = {} if self.peak_flops is None else {"arithmetic": self.flops / self.peak_flops}
        return arithmetic | {
            "link": self.link_bytes / self.link_bandwidth,
            "network": self.network_bytes / self.network_bandwidth,
        }

    @property
    def limit(self) -> str:
        """Name of the largest bound."""
        seconds = self.seconds_by_limit
        return max(seconds, key=seconds.__getitem__)

    @property
    def seconds(self) -> float:
        """Least time of a step, in seconds."""
        return self.seconds_by_limit[self.limit]


def least_time(
    record: RehearsalRecord, *, peak_flops: float | None, link_bandwidth: float, network_bandwidth: float
) -> LeastTime:
    """Return the lower bounds of the last rehearsed step.

    Args:
        record: record of the rehearsal.
        peak_flops: peak FLOP/s of the device; None if unknown.
        link_bandwidth: bytes per second between GPUs of a node, in one direction.
        network_bandwidth: bytes per second between nodes for each GPU, in one direction.
    """
    collectives = [
        collective
        for collective in record.collectives
        if collective.phase == record.step and collective.device == "cuda"
    ]
    return LeastTime(
        flops=record.flops.get(record.step, 0),
        peak_flops=peak_flops,
        link_bytes=sum(_link_bytes(collective) for collective in collectives),
        link_bandwidth=link_bandwidth,
        network_bytes=sum(_network_bytes(collective) for collective in collectives),
        network_bandwidth=network_bandwidth,
    )


def _link_bytes(collective: Collective) -> float:
    """Return the bytes that a rank receives from ranks of its node, including forwarded bytes of other nodes.

    An all-to-all forwards nothing: bytes from other nodes come directly through the network.
    """
    per_node = collective.group_size / collective.num_nodes
    passed = collective.bytes * _PASSES.get(collective.kind, 1) * (1 - 1 / per_node)
    return passed / collective.num_nodes if collective.kind == "all_to_all" else passed


def _network_bytes(collective: Collective) -> float:
    """Return the bytes that a node receives from other nodes, divided by the number of its ranks in the group."""
    per_node = collective.group_size / collective.num_nodes
    entering = collective.bytes * _PASSES.get(collective.kind, 1) * (1 - 1 / collective.num_nodes)
    return entering if collective.kind == "all_to_all" else entering / per_node


_PASSES = {"all_reduce": 2}
"""How often a collective sends its bytes: an all-reduce twice, since it is a reduce-scatter and an all-gather.

Switches that sum the bytes of several ranks need fewer.
"""
