"""Detection of stalled runs, and their record in the run directory."""

from functools import partial
from pathlib import Path

from foundry.core.exit_codes import ExitCode
from foundry.core.protocols import RunContext
from foundry.parallel.flight_recorder import dump_collectives
from foundry.parallel.process_group import World, limit_waits
from foundry.parallel.watchdog import Watchdog
from foundry.run_dir.ends import dump_stacks, leave_note, read_positions, record_end


def build_watchdog(run: RunContext) -> Watchdog:
    """Return the watchdog of this rank, which ends a stalled run and reports the activity of each rank."""
    world, limits = run.world, run.config.distributed
    return Watchdog(
        limits.timeout_seconds,
        world.rank,
        world_size=world.world_size,
        start_timeout_seconds=limits.start_limit_seconds,
        dump=partial(_dump, run.run_dir, world),
        read_dumps=partial(read_positions, run.run_dir, world.rank, world.world_size, limits.timeout_seconds / 2),
        record=partial(_record_stall, run.run_dir),
        when_started=partial(limit_waits, limits.timeout_seconds),
        on_heartbeat=run.on_activity,
    )


def _dump(run_dir: Path, world: World, step: int, activity: str) -> None:
    """Write the stack traces of this process and its recent collectives."""
    dump_stacks(run_dir, world.rank, step, activity)
    if world.world_size > 1:
        dump_collectives(run_dir, world.rank, world.device)


def _record_stall(run_dir: Path, rank: int, reason: str, stack: str) -> None:
    leave_note(kind="Stalled", reason=reason, trace=stack, rank=rank, exit_code=ExitCode.STALLED)
    record_end(run_dir, reason, stack)
