"""Record of a rehearsed run, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Live memory of a device at its peak, or at another moment.

    Attributes:
        phase: phase of the run: "starting", "step 1", "step 1, optimizer", "evaluating".
        bytes: total bytes.
        parts: bytes by part: weights, gathered, gradients, reducing, optimizer, activations, held.
    """

    phase: str
    bytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """Operation that blocks the host until the device has finished all queued work.

    Attributes:
        phase: phase of the run.
        operation: name of the operation, such as aten::_local_scalar_dense, which is `.item()`, or "blocking copy to
            the device".
        where: file:line and text of the innermost line in foundry or in the user's code.
        count: number of calls in this phase.
    """

    phase: str
    operation: str
    where: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in one phase.

    Attributes:
        phase: phase of the run.
        kind: all_gather, all_reduce, reduce_scatter, all_to_all, broadcast or another.
        device: "cuda", or "cpu" for collectives of tensors in host memory.
        group_size: number of ranks.
        num_nodes: number of nodes that these ranks are on.
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
        phase: phase of the run.
        kernel: flash, efficient, cudnn, varlen, or math for the plain formula, which keeps all scores in memory.
        query: (batch, heads, tokens, head size) of the query.
        count: number of calls.
    """

    phase: str
    kernel: str
    query: Sequence[int]
    count: int


@dataclass(frozen=True, kw_only=True)
class LargeTensor:
    """One of the largest tensors allocated on the device.

    Attributes:
        phase: phase of the run.
        operation: operation that allocated the tensor.
        shape: shape of the tensor.
        dtype: dtype without "torch.".
        bytes: size of its storage.
        where: source line, as in `HostWait`.
    """

    phase: str
    operation: str
    shape: Sequence[int]
    dtype: str
    bytes: int
    where: str


@dataclass(frozen=True, kw_only=True)
class RehearsalRecord:
    """Record of a run on fake devices, from rank 0.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: number of ranks on each node.
        device: name of the GPU.
        capacity_bytes: memory of the GPU.
        steps: number of optimizer steps in this rehearsal.
        last_step: number of the last step.
        result: content of result.json; its losses and metrics are meaningless.
        plan: planned bytes by part, and the planned peak as `total`; None if the memory cannot be planned.
        peaks: peak of each phase, in order of time.
        live: live memory after the last step.
        host_waits: host waits by phase, operation and line.
        collectives: collectives by phase, kind, group and device.
        attention: calls of attention kernels by phase, kernel and shape.
        flops: floating-point operations of matrix products, convolutions and attention by phase.
        largest: the largest tensors, largest first.
        notes: settings that were changed for the rehearsal, and why there is no plan.
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
        """Name of the phase of the last step, which is without the additional work of the first step."""
        return f"step {self.last_step}"

    @property
    def peak(self) -> Peak:
        """Highest peak of all phases."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    def peak_of(self, phase: str) -> Peak:
        """Return the peak of one phase."""
        return next(peak for peak in self.peaks if peak.phase == phase)

    def waits_of(self, phase: str) -> list[HostWait]:
        """Return the host waits of one phase."""
        return [wait for wait in self.host_waits if wait.phase == phase]

    def collectives_of(self, phase: str, device: str = "cuda") -> dict[str, int]:
        """Return the number of collectives in one phase by kind, of GPU tensors, or with "cpu" of host tensors."""
        counts: dict[str, int] = {}
        for collective in self.collectives:
            if collective.phase == phase and collective.device == device:
                counts[collective.kind] = counts.get(collective.kind, 0) + collective.count
        return counts

    def as_json(self) -> dict[str, Any]:
        """Convert to plain containers."""
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
