"""The end of a run in which a rank waits too long, and its record in the run directory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from foundry.core.protocols import RunContext
from foundry.parallel.flight_recorder import dump_collectives
from foundry.parallel.process_group import World, limit_waits, roll_call
from foundry.parallel.watchdog import EXIT_STALLED, Watchdog
from foundry.run_dir.ends import dump_stacks, leave_note, record_end


def build_watchdog(run: RunContext) -> Watchdog:
    """Return the watchdog of this rank, which ends a run that stands still and names the activity of each rank."""
    world, limits = run.world, run.config.distributed
    dump = partial(_dump, run.run_dir, world)
    return Watchdog(
        limits.timeout_seconds,
        world.rank,
        start_timeout_seconds=limits.start_limit_seconds,
        roll_call=roll_call(world, limits.timeout_seconds, dump),
        record=partial(_record_stall, run.run_dir, dump),
        when_started=partial(limit_waits, limits.timeout_seconds),
        on_beat=run.on_activity,
    )


def _dump(run_dir: Path, world: World) -> None:
    """Write down where this process is, and which collectives it has begun."""
    dump_stacks(run_dir, world.rank)
    if world.world_size > 1:
        dump_collectives(run_dir, world.rank, world.device)


def _record_stall(run_dir: Path, dump: Callable[[], None], rank: int, reason: str, stack: str) -> None:
    leave_note(kind="Stalled", reason=reason, trace=stack, rank=rank, exit_code=EXIT_STALLED)
    record_end(run_dir, reason, stack)
    dump()
