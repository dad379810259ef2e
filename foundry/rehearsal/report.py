"""Report of a rehearsal and its plan: tables for the terminal, and the section `rehearsal` of plan.json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from foundry.config.build import field_of
from foundry.config.schemas.distributed import DDP, resolve_distributed
from foundry.config.schemas.root import Config
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.collective_counts import step_collectives
from foundry.parallel.precision import PrecisionPolicy
from foundry.planning.report import Sections, num_bytes
from foundry.rehearsal.memory_parts import OPTIMIZER
from foundry.rehearsal.record import Collective, Peak, RehearsalRecord
from foundry.rehearsal.roofline import LeastTime
from foundry.tracking.humanize import count
from foundry.training.trainer import CHECKING

PAGE = "docs/rehearsal.md"

_PARTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # name, parts of a rehearsed peak, parts of the plan
    ("weights", ("weights",), ("weights",)),
    ("gathered weights", ("gathered",), ("gathered",)),
    ("gradients", ("gradients",), ("gradients",)),
    ("in reduction", ("reducing",), ("reducing",)),
    ("optimizer state", ("optimizer",), ("optimizer",)),
    ("activations", ("activations",), ("activations_estimated",)),
    ("other models", ("held",), ("ema", "frozen", "buffers", "generation")),
)
_BUILDING = "held"
"""Memory part of all tensors that a run builds, even weights: only the first optimizer step identifies weights."""
_LIMITS = {"arithmetic": "arithmetic", "link": "within a node", "network": "between nodes"}
_COLUMN = 10


@dataclass(frozen=True, kw_only=True)
class RehearsalReport:
    """Record of a rehearsal, with the numbers to compare it with.

    Attributes:
        record: record of the rehearsal.
        least: lower bounds of the duration of a step.
        expected: number of collectives of a step by kind, from the formula of the strategy; None without a formula.
        tokens_per_step: tokens of a step over all ranks; None if samples do not consist of tokens.
        samples_per_step: samples of a step over all ranks.
        usable_bytes: device memory available to tensors: the total less a margin for CUDA and NCCL.
    """

    record: RehearsalRecord
    least: LeastTime
    expected: Mapping[str, int] | None
    tokens_per_step: int | None
    samples_per_step: int
    usable_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the section of plan.json: the record without its plan and result, and the figures of the tables."""
        record = self.record.as_json()
        del record["plan"], record["result"]
        return {
            **record,
            "peak": asdict(self.record.peak),
            "planned_bytes": self._planned,
            "usable_bytes": self.usable_bytes,
            "above_plan": self._above_plan,
            "expected_collectives": None if self.expected is None else dict(self.expected),
            "least_time": {
                **asdict(self.least),
                "seconds_by_limit": self.least.seconds_by_limit,
                "limit": self.least.limit,
                "seconds": self.least.seconds,
            },
        }

    def sections(self) -> Sections:
        """Return titles and rows of the tables."""
        return (
            ("Rehearsal", self._rows()),
            ("Rehearsed memory per rank", self._memory_rows()),
            ("Collectives of a step", self._collective_rows()),
            ("Least time of a step", self._time_rows()),
        )

    @property
    def _planned(self) -> int | None:
        return None if self.record.plan is None else int(self.record.plan["total"])

    @property
    def _above_plan(self) -> float | None:
        """Difference of the rehearsed peak from the plan, relative to the plan."""
        return self.record.peak.bytes / self._planned - 1 if self._planned else None

    def _rows(self) -> list[tuple[str, str]]:
        record, peak = self.record, self.record.peak
        per_node = f", {record.ranks_per_node} per node" if record.world_size > record.ranks_per_node else ""
        fits = "" if peak.bytes <= self.usable_bytes else ": DOES NOT FIT"
        waits = record.waits_of(record.step)
        attention = Counter[tuple[str, tuple[int, ...]]]()
        for call in record.attention:
            if call.phase == record.step:
                attention[call.kernel, tuple(call.query)] += call.count
        return [
            ("ranks", f"{record.world_size}{per_node}, {record.device}"),
            ("peak memory", f"{num_bytes(peak.bytes)} of {num_bytes(self.usable_bytes)}, in {peak.phase}{fits}"),
            *([] if self._above_plan is None else [("versus the plan", self._difference())]),
            ("after a step", num_bytes(record.live.bytes)),
            ("host waits", "none" if not waits else f"{sum(wait.count for wait in waits)}"),
            *(("", f"{wait.count} x {wait.operation} at {wait.where}") for wait in waits),
            *(("attention", f"{number} x {kernel}, query {query}") for (kernel, query), number in attention.items()),
            *(("note", note) for note in record.notes),
            ("not included", f"speed, memory of kernels and of NCCL: {PAGE}"),
        ]

    def _difference(self) -> str:
        return f"{self._above_plan:+.1%} of {num_bytes(self._planned or 0)}"

    def _memory_rows(self) -> list[tuple[str, str]]:
        """Return a row for each part of the memory: its bytes at the peak of each phase, and in the plan.

        All numbers have one unit. The planned parts need not occur at the same moment.
        """
        phases = self._phases()
        plan = self.record.plan
        largest = max(self.record.peak.bytes, self._planned or 0)
        factor, unit = (2**30, "GiB") if largest >= 10 * 2**30 else (2**20, "MiB")
        titles = [*phases, *([] if plan is None else ["plan"])]
        rows = [(f"peak in {unit}", "".join(f"{title:>{_COLUMN}}" for title in titles))]
        for name, parts, planned in _PARTS:
            values: list[float | None] = [sum(peak.parts.get(part, 0) for part in parts) for peak in phases.values()]
            if plan is not None:
                planned_sizes = [plan[part] for part in planned]
                values.append(None if None in planned_sizes else sum(planned_sizes))
            if any(value is None or value >= factor / 20 for value in values):
                rows.append((name, _cells(values, factor)))
        totals: list[float | None] = [peak.bytes for peak in phases.values()]
        return [*rows, ("total", _cells([*totals, *([] if plan is None else [self._planned])], factor))]

    def _phases(self) -> dict[str, Peak]:
        """Return the peaks to show, by a short name: of the build, the last step, the evaluation and the checkpoint."""
        record, phases = self.record, dict[str, Peak]()
        names = [peak.phase for peak in record.peaks]
        first_step = next(index for index, name in enumerate(names) if name.startswith("step "))
        building = [peak for peak in record.peaks[:first_step] if not peak.phase.startswith(CHECKING)]
        phases["build"] = _count_as_weights(max(building, key=lambda peak: peak.bytes))
        phase_names = {
            "passes": record.step,
            "optimizer": record.step + OPTIMIZER,
            "evaluate": "evaluating",
            "save": "saving a checkpoint",
        }
        return phases | {title: record.peak_of(name) for title, name in phase_names.items() if name in names}

    def _collective_rows(self) -> list[tuple[str, str]]:
        calls = [collective for collective in self.record.collectives if collective.phase == self.record.step]
        rows = [
            (collective.kind, _format_collective(collective))
            for collective in sorted(calls, key=lambda collective: (collective.kind, -collective.bytes))
        ]
        if not rows:
            return []
        return [*rows, ("by formula", self._format_comparison())]

    def _format_comparison(self) -> str:
        if self.expected is None:
            return "unknown for this run"
        record = self.record
        counts = Counter(record.collectives_of(record.step)) + Counter(record.collectives_of(record.step, "cpu"))
        kinds = sorted((set(self.expected) | set(counts)) - {"all_to_all"})  # their number depends on Muon
        expected = {kind: self.expected.get(kind, 0) for kind in kinds}
        deviations = [f"{kind} {number}" for kind, number in expected.items() if number != counts[kind]]
        return ", ".join(deviations) or "the same"

    def _time_rows(self) -> list[tuple[str, str]]:
        least, seconds = self.least, self.least.seconds_by_limit
        rows = []
        if least.peak_flops is None:
            rows.append(("arithmetic", f"{least.flops:.4g} FLOPs; the peak rate of the device is unknown"))
        else:
            rows.append(
                (
                    "arithmetic",
                    f"{_time(seconds['arithmetic'])}: {least.flops:.4g} FLOPs at {least.peak_flops:.4g} FLOP/s",
                )
            )
        traffic = (
            ("link", least.link_bytes, least.link_bandwidth),
            ("network", least.network_bytes, least.network_bandwidth),
        )
        for limit, size, bandwidth in traffic:
            if size:
                rows.append(
                    (_LIMITS[limit], f"{_time(seconds[limit])}: {num_bytes(size)} at {bandwidth / 1e9:.4g} GB/s")
                )
        if not least.seconds:
            return rows
        rate, unit = self.samples_per_step / least.seconds, "samples"
        if self.tokens_per_step is not None:
            rate, unit = self.tokens_per_step / least.seconds, "tokens"
        return [*rows, ("at least", f"{_time(least.seconds)} a step, at most {count(round(rate))} {unit} a second")]


def _format_collective(each: Collective) -> str:
    nodes = f" on {each.num_nodes} nodes" if each.num_nodes > 1 else ""
    where = "" if each.device == "cuda" else ", in host memory"
    return f"{each.count} among {each.group_size} ranks{nodes}, {num_bytes(each.bytes)}{where}"


def _cells(values: Sequence[float | None], factor: int) -> str:
    return "".join(f"{'?' if value is None else f'{value / factor:,.1f}':>{_COLUMN}}" for value in values)


def _count_as_weights(peak: Peak) -> Peak:
    """Return the peak of the build phase with the bytes of `_BUILDING` counted as weights."""
    parts = {**peak.parts}
    parts["weights"] = parts.get("weights", 0) + parts.pop(_BUILDING, 0)
    return Peak(phase=peak.phase, bytes=peak.bytes, parts=parts)


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def expected_collectives(
    config: Config, model: nn.Module, world_size: int, *, is_packed: bool
) -> Mapping[str, int] | None:
    """Return the number of collectives that a step should have, by kind; None if it is unknown.

    There is no formula for DDP with buckets, for frozen parameters, for packed rows, whose number differs from step to
    step, and for generated completions.

    Args:
        config: configuration of the run.
        model: model of the run; its tensors may be fake.
        world_size: number of ranks.
        is_packed: whether rows contain several samples.
    """
    strategy = resolve_distributed(config.distributed, world_size)
    has_buckets = isinstance(strategy, DDP) and not strategy.shard_optimizer and strategy.overlap_grad_reduce
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    if has_buckets or is_frozen or is_packed or field_of(config.objective, "num_generations_per_prompt", None):
        return None
    blocks, policy = list(find_blocks(model)), PrecisionPolicy(config.precision.mode)
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    dp_size = config.distributed.dp_size(world_size)
    return step_collectives(
        strategy,
        num_blocks=len(blocks),
        num_microbatches=config.hparams.global_batch_size // (config.hparams.per_gpu_batch_size * dp_size),
        has_replicated=any(policy.is_replicated(p, in_block=p in in_blocks) for p in model.parameters()),
    )
