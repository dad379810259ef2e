"""Process of a rehearsal: `python -m foundry.rehearsal.child PARENT REQUEST ANSWER`.

PARENT is the process ID of the command; this process ends when the parent ends. REQUEST and ANSWER are paths of JSON
files. The device guard is loaded before anything imports torch.
"""

if __name__ == "__main__":
    from foundry.core.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

import sys

if __name__ == "__main__":
    from foundry.core.stop_signals import end_with_parent

    end_with_parent(int(sys.argv[1]))

if __name__ == "__main__":
    from foundry.rehearsal.guard import load_guard

    load_guard()  # before torch is imported

import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundry.config.launch_variables import LaunchEnvironment
from foundry.config.record.frozen import load_config
from foundry.config.schemas.distributed import Distributed
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, format_reason
from foundry.engine.train import train
from foundry.parts.data import build_data
from foundry.planning.fake import build_adapted, build_fake
from foundry.planning.fits import plan_memory
from foundry.planning.memory import Memory
from foundry.rehearsal.device_dispatch import DeviceDispatch
from foundry.rehearsal.exchange import Request
from foundry.rehearsal.fake_cuda import fake_cuda
from foundry.rehearsal.machine import find_gpu
from foundry.rehearsal.memory_parts import assign_parts
from foundry.rehearsal.record import Peak, RehearsalRecord
from foundry.rehearsal.short_run import shorten, take_steps

_LARGEST_CHECKPOINT = 2**30
"""Largest size in bytes of this rank's part of a checkpoint that a shortened rehearsal writes."""


class _Follower:
    """Callback that starts a phase for each activity of a run, and records the live memory after each step."""

    def __init__(self, dispatch: DeviceDispatch) -> None:
        self._dispatch = dispatch
        self.live = Peak(phase="starting", bytes=0, parts={})
        self.steps = 0

    def follow(self, step: int, activity: str) -> None:
        """Begin the phase of an activity. Passed to `foundry.engine.train.train` as `on_activity`."""
        dispatch = self._dispatch
        if dispatch.phase.startswith("step "):
            self.live = Peak(phase=dispatch.phase, bytes=dispatch.ledger.live, parts=dispatch.ledger.parts)
        phase = f"step {step}" if activity == "training" else activity
        if phase != dispatch.phase:
            self.steps += activity == "training"
            dispatch.begin(phase)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Rehearse the run of a request. Return the record, or the error, as plain data."""
    try:
        return {"rehearsed": rehearse_here(Request(**request)).as_json()}
    except ConfigError as error:
        return {"violations": [[violation.key, violation.message] for violation in error.violations]}
    except BaseException as error:
        return {"reason": format_reason(error), "traceback": traceback.format_exc()}


def rehearse_here(request: Request) -> RehearsalRecord:
    """Rehearse a run in this process, which must have loaded the device guard.

    Raises:
        ConfigError: if a setting is invalid, or cannot be rehearsed.
    """
    gpu, world_size = find_gpu(request.device, "device"), request.world_size
    config, notes = take_steps(load_config(Path(request.config_dir), trust=True), request.steps, world_size)
    try:
        plan: Memory | None = _plan(config, world_size)
    except ConfigError:
        raise
    except Exception as error:  # a user's model may need real numbers in its constructor
        plan = None
        notes.append(f"the memory cannot be planned: {format_reason(error)}")
    config = shorten(config, world_size, saves=plan is not None and _checkpoint_bytes(plan) <= _LARGEST_CHECKPOINT)
    dispatch = DeviceDispatch(request.ranks_per_node)
    follower = _Follower(dispatch)
    with (
        _ranks(world_size, request.ranks_per_node),
        fake_cuda(gpu, request.ranks_per_node, dispatch),
        assign_parts(dispatch.ledger),
    ):
        result = train(config, Path(request.run_dir), join=_join, on_activity=follower.follow).result
    return RehearsalRecord(
        world_size=world_size,
        ranks_per_node=request.ranks_per_node,
        device=gpu.name,
        capacity_bytes=gpu.memory_bytes,
        steps=follower.steps,
        last_step=int(result["step"]),
        result=result,
        plan=None if plan is None else {**asdict(plan), "total": plan.total},
        peaks=[Peak(phase=p, bytes=peak.size, parts=peak.parts) for p, peak in dispatch.ledger.peaks.items()],
        live=follower.live,
        host_waits=dispatch.waits,
        collectives=dispatch.collectives,
        attention=dispatch.attention,
        flops=dict(dispatch.flops),
        largest=dispatch.largest,
        notes=notes,
    )


def _plan(config: Config, world_size: int) -> Memory:
    fake = build_fake(partial(build_adapted, config))
    return plan_memory(config, fake, build_data(config), world_size=world_size, device_type="cuda")


def _checkpoint_bytes(plan: Memory) -> int:
    """Return the bytes of this rank's part of a checkpoint. An optimizer state of unknown size counts as AdamW's."""
    return plan.weights + plan.ema + (2 * plan.weights if plan.optimizer is None else plan.optimizer)


def _join(config: Distributed, environment: LaunchEnvironment, backend: str, device: torch.device) -> None:
    """Create a process group whose other ranks are fake. Every collective completes at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=0, world_size=environment.world_size)


@contextmanager
def _ranks(world_size: int, ranks_per_node: int) -> Iterator[None]:
    """Context manager that sets the environment variables that a launcher sets for rank 0 of several ranks."""
    environment = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        del os.environ[name]
    if world_size > 1:
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks_per_node}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def main() -> None:
    """Read the request, and write the answer."""
    request, path = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    path.write_text(json.dumps(answer(request)))


if __name__ == "__main__":
    main()
