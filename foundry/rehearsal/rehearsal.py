"""Entry point of rehearsals: `rehearse(config, world_size=256)` runs `foundry.engine.train.train` on fake GPUs.

A rehearsal needs no GPU and no other rank. It runs in a separate process, which must load a device guard before torch.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foundry.config.record.frozen import save_config
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation
from foundry.core.safe_path import environment_of_module
from foundry.rehearsal.exchange import RehearsalError, Request, read_answer
from foundry.rehearsal.guard import reason_not_to_load
from foundry.rehearsal.machine import find_gpu
from foundry.rehearsal.record import RehearsalRecord
from foundry.rehearsal.short_run import take_steps

Send = Callable[[Request, Path], Mapping[str, Any]]
"""Function that sends a request to a process, with a folder for their messages, and returns the answer."""


def rehearse(
    config: Config,
    *,
    world_size: int = 1,
    ranks_per_node: int = 8,
    device: str = "h100",
    steps: int = 2,
    run_dir: Path | None = None,
    send: Send | None = None,
) -> RehearsalRecord:
    """Run a few steps on fake GPUs, as rank 0 of any number of ranks, and return their record.

    Tensors on the device have shapes but no values. Tensors on the host are real, so data, order, counts and files are
    the same as in the run. The record has memory, collectives, host waits, attention kernels and FLOPs, but no
    durations, no memory of kernels and of NCCL, and no fragmentation. torch.compile is disabled. The run evaluates one
    microbatch per rank at the end, without samples, and saves only a checkpoint of up to 1 GiB per rank.

    Args:
        config: the composed configuration.
        world_size: number of ranks.
        ranks_per_node: number of ranks on each node; at most `world_size` are used.
        device: short name of a GPU in `foundry.rehearsal.machine.GPUS`.
        steps: number of the last optimizer step.
        run_dir: run directory, which may contain a run to resume; None for a temporary one.
        send: function that sends the request to a process; None for a new process.

    Raises:
        ConfigError: if a setting is invalid or cannot be rehearsed, the GPU is unknown, or there is no compiler for the
            device guard.
        RehearsalError: if the run fails; the message contains the reason and the traceback.
    """
    check_rehearsal(config, world_size=world_size, ranks_per_node=ranks_per_node, device=device, steps=steps)
    with tempfile.TemporaryDirectory(prefix="foundry-rehearsal-") as name:
        folder = Path(name)
        save_config(config, folder)
        request = Request(
            config_dir=str(folder),
            run_dir=str(run_dir or folder / "run"),
            world_size=world_size,
            ranks_per_node=min(ranks_per_node, world_size),
            device=device,
            steps=steps,
        )
        return read_answer((send or _start_process)(request, folder))


def _start_process(request: Request, folder: Path) -> dict[str, Any]:
    request_file, answer_file = folder / "request.json", folder / "answer.json"
    request_file.write_text(json.dumps(asdict(request)))
    command = [
        sys.executable,
        "-P",
        "-m",
        "foundry.rehearsal.child",
        str(os.getpid()),
        str(request_file),
        str(answer_file),
    ]
    process = subprocess.run(command, env=environment_of_module(), capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(answer_file.read_text())
    except FileNotFoundError:
        last_line = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise RehearsalError(f"the rehearsal process ended without a result: {last_line}") from None
    return answer


def check_rehearsal(
    config: Config, *, world_size: int, ranks_per_node: int = 8, device: str = "h100", steps: int = 2, prefix: str = ""
) -> None:
    """Check that a run can be rehearsed, before anything is built or read.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        ranks_per_node: number of ranks on each node.
        device: short name of a GPU.
        steps: number of the last optimizer step.
        prefix: prefix of the argument names in messages, such as "plan.".

    Raises:
        ConfigError: if the strategy cannot be rehearsed, the GPU is unknown, the nodes are not full, or there is no
            compiler for the device guard.
    """
    find_gpu(device, f"{prefix}device")
    if world_size % (per_node := min(ranks_per_node, world_size)):
        message = f"is {per_node} but must divide the {world_size} ranks"
        raise ConfigError(Violation(f"{prefix}ranks_per_node", message))
    take_steps(config, steps, world_size)
    if reason := reason_not_to_load():
        raise ConfigError(Violation(f"{prefix}rehearse", f"is not possible: {reason}"))
