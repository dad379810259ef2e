"""The record of a rehearsed run, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of a device's memory that are live at one moment.

    Attributes:
        phase: of the run: "starting", "step 1", "step 1, optimizer", "evaluating".
        bytes: all of them.
        parts: bytes by part: weights, gathered, gradients, reducing, optimizer, activations and others.
    """

    phase: str
    bytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """An operation before whose end the device has to finish all queued work.

    Attributes:
        phase: of the run.
        operation: such as aten::_local_scalar_dense, which is `.item()`, or "copy to the device".
        where: file:line and text of the innermost line in foundry or in the user's code.
        count: how often in this phase.
    """

    phase: str
    operation: str
    where: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in one phase.

    Attributes:
        phase: of the run.
        kind: all_gather, all_reduce, reduce_scatter, all_to_all, broadcast or another.
        device: "cuda", or "cpu" for those between hosts.
        group_size: number of ranks.
        num_nodes: on how many nodes these ranks are.
        count: number of calls.
        bytes: sum over calls of the larger of input and output on this rank.
    """

    phase: str
    kind: str
    device: str
    group_size: int
    num_nodes: int
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Calls of one attention kernel with one shape.

    Attributes:
        phase: of the run.
        kernel: flash, efficient, varlen or math, which keeps all scores in memory.
        query: (batch, heads, tokens, head size) of the query.
        count: number of calls.
    """

    phase: str
    kernel: str
    query: Sequence[int]
    count: int


@dataclass(frozen=True, kw_only=True)
class LargeTensor:
    """One of the largest tensors that were allocated on the device.

    Attributes:
        phase: of the run.
        operation: that made it.
        shape: of it.
        dtype: without "torch.".
        bytes: of its storage.
        where: as of `HostWait`.
    """

    phase: str
    operation: str
    shape: Sequence[int]
    dtype: str
    bytes: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The record of a run on devices that do not exist, from rank 0.

    Attributes:
        world_size: ranks.
        ranks_per_node: of them.
        device: name of the GPU.
        capacity_bytes: memory of the GPU.
        steps: optimizer steps that were taken by this rehearsal.
        last_step: number of the last one.
        result: as result.json has it; its losses and metrics mean nothing.
        plan: bytes by part that were planned, and their `total`; None if the plan cannot be computed.
        peaks: of each phase, in order of time.
        live: after the last step.
        host_waits: by phase, operation and line.
        collectives: by phase, kind, group and device.
        attention: by phase, kernel and shape.
        flops: floating-point operations of matrix products, convolutions and attention by phase.
        largest: the largest tensors, largest first.
        notes: settings that were changed for the rehearsal.
    """

    world_size: int
    ranks_per_node: int
    device: str
    capacity_bytes: int
    steps: int
    last_step: int
    result: Mapping[str, Any]
    plan: Mapping[str, Any] | None
    peaks: Sequence[Peak]
    live: Peak
    host_waits: Sequence[HostWait]
    collectives: Sequence[Collective]
    attention: Sequence[Attention]
    flops: Mapping[str, int]
    largest: Sequence[LargeTensor]
    notes: Sequence[str]

    @property
    def step(self) -> str:
        """Phase of the last step, which has no work that only the first step has."""
        return f"step {self.last_step}"

    @property
    def peak(self) -> Peak:
        """The highest of all phases."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    def peak_of(self, phase: str) -> Peak:
        """The peak of one phase."""
        return next(peak for peak in self.peaks if peak.phase == phase)

    def waits_of(self, phase: str) -> list[HostWait]:
        """The host waits of one phase."""
        return [wait for wait in self.host_waits if wait.phase == phase]

    def collectives_of(self, phase: str, device: str = "cuda") -> dict[str, int]:
        """Number of calls by kind, of one phase, between devices or between hosts."""
        counts: dict[str, int] = {}
        for each in self.collectives:
            if each.phase == phase and each.device == device:
                counts[each.kind] = counts.get(each.kind, 0) + each.count
        return counts

    def as_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the record from the containers of `as_json`."""
        lists = {
            "peaks": Peak,
            "host_waits": HostWait,
            "collectives": Collective,
            "attention": Attention,
            "largest": LargeTensor,
        }
        values = {item.name: content[item.name] for item in fields(cls)}
        values |= {name: [kind(**each) for each in values[name]] for name, kind in lists.items()}
        return cls(**{**values, "live": Peak(**values["live"])})
