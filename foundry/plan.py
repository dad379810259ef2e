"""`python -m foundry.plan [overrides]`: say what a run would do, without doing it."""

if __name__ == "__main__":
    from foundry.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import to_absolute_path

from foundry.composed_command import run_composed
from foundry.config.command import check_output
from foundry.config.errors import ConfigError, Violation
from foundry.config.resolvers import world_size
from foundry.config.schemas.distributed import resolve_distributed
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.config.sources import local_path
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import PLAN, STATUS

_ROWS, _MOST_ROWS = 100_000, 10_000_000
"""Of schedule.csv: where nobody says how many, and at most."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan besides the run itself."""

    every: int | None = setting(
        None,
        f"write every n-th update to schedule.csv; null: as many as make at most {_ROWS:,} rows, all of a shorter run",
        ge=1,
    )
    step_seconds: float | None = setting(None, "duration of an optimizer step, for the length of the run", gt=0)
    device_gib: float | None = setting(
        None,
        "memory of each device that the run is planned for; null: of this machine's GPU, where it has one",
        gt=0,
    )
    measured: str | None = setting(None, "run directory to take that duration from: its median", path=True)


def plan(config: Config, options: PlanOptions, run_dir: Path) -> dict[str, Any]:
    """Write plan.json, schedule.csv and schedule.png into the run directory and print a table; weights take no memory.

    Raises:
        ConfigError: the data shows a setting to be wrong, or the run directory holds a run.
    """
    from rich.console import Console

    from foundry.parts import build_budget, build_data, build_schedule, constant_weight_decay
    from foundry.planning import report
    from foundry.planning.derive import planned_updates, resolve_phases, select_steps

    if (run_dir / STATUS).exists():
        raise ConfigError(Violation("hydra.run.dir", f"is {run_dir}, which holds a run; choose another"))
    for name, is_earlier in report.RECOGNIZERS.items():
        check_output(name, run_dir / name, own=name, is_earlier=is_earlier)
    step_seconds = options.step_seconds or (_measured(options.measured) if options.measured else None)
    data, ranks = build_data(config), world_size(config.distributed.nproc_per_node)
    budget = build_budget(config, data, config.distributed.dp_size(ranks))
    steps = _written(options.every, budget.total_steps)
    schedule, decay = build_schedule(config, budget), constant_weight_decay(config)
    content = _content(config, budget, data, schedule, ranks, options.device_gib)
    if step_seconds is not None:
        content["step_seconds"] = step_seconds
        content["run_seconds"] = step_seconds * budget.total_samples / budget.batch_sizes.final
    write_atomically(run_dir / PLAN, json.dumps(content, indent=2) + "\n")
    files = [run_dir / PLAN, report.write_csv(planned_updates(schedule, budget, decay, steps), run_dir)]
    shown = list(planned_updates(schedule, budget, decay, select_steps(schedule, budget)))
    files.append(report.write_picture(shown, resolve_phases(schedule, budget), run_dir))
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    report.show(content, console)
    console.print(*(str(file) for file in files), sep="\n")
    return content


def _written(every: int | None, total_steps: int) -> range:
    """The updates in schedule.csv, counted from one.

    Raises:
        ConfigError: they are too many.
    """
    rows = total_steps // every if every is not None else 0
    if rows > _MOST_ROWS:
        near = -(-total_steps // _ROWS)
        message = (
            f"is {every}, which makes {rows:,} rows of schedule.csv; at most {_MOST_ROWS:,} are written: give {near}"
        )
        raise ConfigError(Violation("plan.every", message))
    stride = every or max(1, -(-total_steps // _ROWS))
    return range(stride, total_steps + 1, stride)


def _content(
    config: Config, budget: Any, data: Any, schedule: Any, ranks: int, device_gib: float | None
) -> dict[str, Any]:
    """The plan with what the model needs and how it starts."""
    import torch

    from foundry.planning.derive import build_plan
    from foundry.planning.fake import build_adapted, build_fake
    from foundry.planning.fits import check_gradient_sync, plan_memory, row_tokens
    from foundry.planning.memory import checkpoint_bytes

    on_gpu = torch.cuda.is_available()
    fake = build_fake(partial(build_adapted, config))
    device_type = "cuda" if on_gpu else "cpu"
    memory = plan_memory(config, fake, data, world_size=ranks, device_type=device_type)
    capacity = torch.cuda.mem_get_info()[1] if on_gpu and device_gib is None else int((device_gib or 0) * 2**30)
    if capacity:
        check_gradient_sync(config, memory, world_size=ranks, capacity=capacity)
    return {
        **build_plan(
            config,
            budget,
            data,
            schedule,
            fake.model,
            world_size=ranks,
            strategy=resolve_distributed(config.distributed, ranks).strategy,
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
            pack_tokens=row_tokens(config),
        ),
        "memory": {**asdict(memory), "total": memory.total, "peak": memory.peak},
        "checkpoint_bytes": checkpoint_bytes(config, fake),
    }


def _measured(given: str) -> float:
    """The median duration of a run's logged steps; the first, which warms up, does not count.

    Args:
        given: the run directory, meant from where the command was started.

    Raises:
        ConfigError: it has logged no more than one step.
    """
    from foundry.tracking.metrics_file import read_curve

    run_dir = Path(to_absolute_path(str(local_path("plan.measured", given))))
    try:
        logged = read_curve(run_dir, "step_seconds")
    except (FileNotFoundError, ValueError):
        logged = []
    steps = [seconds for _, seconds in logged if isinstance(seconds, (int, float)) and isfinite(seconds)][1:]
    if not steps:
        raise ConfigError(Violation("plan.measured", f"is {run_dir}, but no metrics.jsonl in it logs several steps"))
    return float(median(steps))


if __name__ == "__main__":
    run_composed(PlanOptions, plan, name="foundry.plan", doc=__doc__.split(": ", 1)[1])
