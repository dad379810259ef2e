"""`foundry plan [overrides]`: describe a run without starting it."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import to_absolute_path

from foundry.commands.composed_command import run_composed
from foundry.config.command import Outcome, check_output
from foundry.config.composition.resolvers import world_size
from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import resolve_distributed
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.config.sources import local_path
from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.core.stop_signals import signals_as_exit
from foundry.rehearsal.machine import GPUS, Gpu, find_gpu
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import PLAN, STATUS
from foundry.run_dir.redact import one_line, printable

_DEVICE, _RANKS_PER_NODE = "h100", 8
"""Default GPU and ranks per node of a rehearsal."""
_ROWS, _MOST_ROWS = 100_000, 10_000_000
"""Default and maximum number of rows of schedule.csv."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the command, which extend the options of a run."""

    every: int | None = setting(
        None,
        f"write every n-th update to schedule.csv; null: n is chosen to write at most {_ROWS:,} rows",
        ge=1,
    )
    step_seconds: float | None = setting(
        None, "duration of an optimizer step, to estimate the duration of the run", gt=0
    )
    device_gib: float | None = setting(
        None,
        "memory per device to plan for; null: free memory of this machine's GPU, if it has one",
        gt=0,
    )
    measured: str | None = setting(None, "run directory whose median step duration is used", path=True)
    ranks: int | None = setting(
        None, "number of ranks; null: distributed.nproc_per_node, or the number that a launcher started", ge=1
    )
    device: str | None = setting(
        None,
        f"GPU to plan for: {', '.join(GPUS)}; null: {_DEVICE} for a rehearsal, else this machine's device",
    )
    rehearse: bool = setting(
        False,
        "simulate two steps of the run with GPUs and ranks that this machine does not have, and compare them with "
        "the plan",
    )
    ranks_per_node: int | None = setting(
        None, f"ranks per node in a rehearsal; null: {_RANKS_PER_NODE}, or all if there are fewer", ge=1
    )
    link_gb_per_second: float | None = setting(
        None,
        "bandwidth between GPUs of a node in one direction, for the minimum time of a step; null: from the data sheet",
        gt=0,
    )
    network_gb_per_second: float | None = setting(
        None, "bandwidth between nodes per GPU in one direction; null: the value of the usual network card", gt=0
    )

    def overrides(self) -> list[str]:
        """Return the overrides of the run that these options imply.

        Raises:
            ConfigError: an option requires `rehearse`, which is not set.
        """
        if not self.rehearse:
            only = ("ranks_per_node", "link_gb_per_second", "network_gb_per_second")
            ignored = [name for name in only if getattr(self, name) is not None]
            if ignored:
                raise ConfigError(Violation(name, "requires a rehearsal; add plan.rehearse=true") for name in ignored)
        return [] if self.ranks is None else [f"distributed.nproc_per_node={self.ranks}"]


def plan(config: Config, options: PlanOptions, run_dir: Path) -> dict[str, Any]:
    """Write plan.json, schedule.csv and schedule.png into the run directory, and print tables; allocates no weights.

    Raises:
        ConfigError: a setting does not fit the data, or the run directory contains a run.
    """
    from rich.console import Console

    from foundry.parts.data import build_data
    from foundry.parts.optimization import build_budget, build_schedule, constant_weight_decay
    from foundry.planning import report
    from foundry.planning.derive import planned_updates, resolve_phases, select_steps
    from foundry.planning.fake import build_adapted, build_fake

    if (run_dir / STATUS).exists():
        raise ConfigError(Violation("hydra.run.dir", f"is {run_dir}, which holds a run; choose another"))
    for name, is_earlier in report.RECOGNIZERS.items():
        check_output(name, run_dir / name, own_name=name, is_earlier=is_earlier)
    step_seconds = options.step_seconds or (_median_step_seconds(options.measured) if options.measured else None)
    ranks = world_size(config.distributed.nproc_per_node)
    target = _find_target(config, options, ranks)
    data = build_data(config)
    budget = build_budget(config, data, config.distributed.dp_size(ranks))
    steps = _schedule_steps(options.every, budget.total_steps)
    schedule, decay = build_schedule(config, budget), constant_weight_decay(config.optimizer)
    fake = build_fake(partial(build_adapted, config))
    content = _content(config, budget, data, schedule, fake, ranks, target)
    if step_seconds is not None:
        content["step_seconds"] = step_seconds
        content["run_seconds"] = step_seconds * budget.total_samples / budget.batch_sizes.final
    write_atomically(run_dir / PLAN, json.dumps(content, indent=2) + "\n")
    files = [run_dir / PLAN, report.write_csv(planned_updates(schedule, budget, decay, steps), run_dir)]
    plotted = list(planned_updates(schedule, budget, decay, select_steps(schedule, budget)))
    files.append(report.write_picture(plotted, resolve_phases(schedule, budget), run_dir))
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    report.show(content, console)
    if options.rehearse:
        assert target.gpu is not None
        content["rehearsal"] = _rehearse(config, options, content, fake.model, ranks, target.gpu, console)
        write_atomically(run_dir / PLAN, json.dumps(content, indent=2) + "\n")
    console.print(*(str(file) for file in files), sep="\n")
    return content


def _schedule_steps(every: int | None, total_steps: int) -> range:
    """Return the numbers of the optimizer steps in schedule.csv, counted from 1.

    Raises:
        ConfigError: there are more than `_MOST_ROWS`.
    """
    rows = total_steps // every if every is not None else 0
    if rows > _MOST_ROWS:
        least = -(-total_steps // _ROWS)
        message = (
            f"is {every}, which makes {rows:,} rows of schedule.csv; at most {_MOST_ROWS:,} are written: set {least}"
        )
        raise ConfigError(Violation("plan.every", message))
    stride = every or max(1, -(-total_steps // _ROWS))
    return range(stride, total_steps + 1, stride)


def _content(
    config: Config, budget: Any, data: Any, schedule: Any, fake: Any, ranks: int, target: "_Target"
) -> dict[str, Any]:
    """Return the content of plan.json, with the memory of the run and the size of a checkpoint."""
    from foundry.planning.derive import build_plan
    from foundry.planning.fits import check_gradient_sync, plan_memory, row_tokens, usable_memory
    from foundry.planning.memory import checkpoint_bytes

    memory = plan_memory(config, fake, data, world_size=ranks, device_type=target.device_type)
    distributed, usable = resolve_distributed(config.distributed, ranks), None
    if target.free_bytes is not None:
        usable = usable_memory(target.free_bytes, distributed, ranks, target.device_type)
        check_gradient_sync(config, memory, world_size=ranks, capacity=usable)
    return {
        **build_plan(
            config,
            budget,
            data,
            schedule,
            fake.model,
            world_size=ranks,
            strategy=distributed.strategy,
            device=target.name,
            pack_tokens=row_tokens(config),
        ),
        "memory": {**asdict(memory), "total": memory.total, "peak": memory.peak, "usable": usable},
        "checkpoint_bytes": checkpoint_bytes(config, fake),
    }


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Device that the run is planned for.

    Attributes:
        name: name of the device.
        device_type: "cuda" or "cpu".
        free_bytes: `plan.device_gib`, else the memory of the GPU (on this machine, the free memory); None for a CPU.
        gpu: GPU of a rehearsal or of `plan.device`; None for this machine's device.
    """

    name: str
    device_type: str
    free_bytes: int | None
    gpu: Gpu | None


def _find_target(config: Config, options: PlanOptions, ranks: int) -> _Target:
    """Return the device that the options select, or this machine's.

    Raises:
        ConfigError: the GPU is unknown, or the rehearsal is not possible.
    """
    public_name = options.device or (_DEVICE if options.rehearse else None)
    free_bytes = None if options.device_gib is None else int(options.device_gib * 2**30)
    if public_name is None:
        from foundry.parallel.device import choose_device, device_name, free_memory

        device = choose_device(config.device.kind)
        if free_bytes is None and device.type == "cuda":
            free_bytes = free_memory(device)
        return _Target(name=device_name(device), device_type=device.type, free_bytes=free_bytes, gpu=None)
    gpu = find_gpu(public_name, "plan.device")
    if config.device.kind is DeviceKind.cpu:
        raise ConfigError(Violation("device", f"is cpu but the plan is for {gpu.name}; leave it out"))
    if options.rehearse:
        from foundry.rehearsal.rehearsal import check_rehearsal

        per_node = options.ranks_per_node or _RANKS_PER_NODE
        check_rehearsal(config, world_size=ranks, ranks_per_node=per_node, device=public_name, prefix="plan.")
    free_bytes = gpu.memory_bytes if free_bytes is None else free_bytes
    return _Target(name=gpu.name, device_type="cuda", free_bytes=free_bytes, gpu=gpu)


def _rehearse(
    config: Config, options: PlanOptions, content: dict[str, Any], model: Any, ranks: int, gpu: Gpu, console: Any
) -> dict[str, Any]:
    """Rehearse the run, print its tables, and return the `rehearsal` section of plan.json.

    Raises:
        ConfigError: a setting of the run is invalid, or cannot be rehearsed.
        SystemExit: the run failed; the reason has been printed.
    """
    from foundry.planning.report import show_sections
    from foundry.rehearsal.exchange import RehearsalError
    from foundry.rehearsal.rehearsal import rehearse
    from foundry.rehearsal.report import RehearsalReport, expected_collectives
    from foundry.rehearsal.roofline import least_time
    from foundry.training.throughput import peak_flops

    per_node, device = options.ranks_per_node or _RANKS_PER_NODE, options.device or _DEVICE
    try:
        with signals_as_exit(), console.status("rehearsing two steps") if console.is_terminal else nullcontext():
            record = rehearse(config, world_size=ranks, ranks_per_node=per_node, device=device)
    except RehearsalError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        sys.exit(ExitCode.FAILED)
    link, network = options.link_gb_per_second, options.network_gb_per_second
    report = RehearsalReport(
        record=record,
        least=least_time(
            record,
            peak_flops=peak_flops(gpu.name, config.precision.mode, tf32=config.precision.tf32),
            link_bandwidth=gpu.link_bandwidth if link is None else link * 1e9,
            network_bandwidth=gpu.network_bandwidth if network is None else network * 1e9,
        ),
        expected=expected_collectives(config, model, ranks, is_packed=content["packing"] is not None),
        tokens_per_step=content["tokens_per_step"],
        samples_per_step=content["global_batch_size"],
        usable_bytes=content["memory"]["usable"],
    )
    show_sections(report.sections(), console)
    return report.as_json()


def _median_step_seconds(path: str) -> float:
    """Return the median step duration of a run's logged steps, without the first logged step, which includes warmup.

    Args:
        path: run directory, relative to the folder where the command was started.

    Raises:
        ConfigError: the run has no metrics.jsonl, a damaged one, or fewer than two logged steps.
    """
    from foundry.tracking.metrics_file import read_curve

    run_dir = Path(to_absolute_path(str(local_path("plan.measured", path))))
    try:
        logged = read_curve(run_dir, "step_seconds")
    except FileNotFoundError:
        logged = []
    except (ValueError, OSError) as error:
        message = f"is {run_dir}, whose metrics cannot be read: {one_line(str(error))}; choose another run"
        raise ConfigError(Violation("plan.measured", message)) from None
    steps = [seconds for _, seconds in logged if isinstance(seconds, (int, float)) and isfinite(seconds)][1:]
    if not steps:
        raise ConfigError(
            Violation(
                "plan.measured",
                f"is {run_dir}, whose metrics.jsonl has fewer than two logged steps; choose another run",
            )
        )
    return float(median(steps))


def main() -> None:
    """Entry point of the command."""
    run_composed(
        PlanOptions,
        lambda config, options, run_dir: Outcome(plan(config, options, run_dir)),
        name="foundry.plan",
        doc=__doc__.split(": ", 1)[1],
        overrides_of=PlanOptions.overrides,
    )
