"""Rehearsing a run: `rehearse(config, world_size=256)` runs `foundry.engine.train.train` on GPUs that do not exist.

It needs no GPU and no other rank. It runs in a separate process, which must load a device guard before torch.
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
from foundry.rehearsal.rehearsed import Rehearsed
from foundry.rehearsal.shortened import take_steps

Ask = Callable[[Request, Path], Mapping[str, Any]]
"""Has a process rehearse a request, with a folder for their messages, and returns the answer of the process."""


def rehearse(
    config: Config,
    *,
    world_size: int = 1,
    ranks_per_node: int = 8,
    device: str = "h100",
    steps: int = 2,
    run_dir: Path | None = None,
    shortens: bool = True,
    ask: Ask | None = None,
) -> Rehearsed:
    """Take a few steps of a run on fake GPUs, as rank 0 of any number of ranks, and return their record.

    Tensors on the device have shapes and no numbers, tensors on the host are real: data, order, counts and files are
    those of the run. The record has memory, collectives, host waits, attention kernels and FLOPs. It has no speed, no
    memory of kernels and of NCCL, and no fragmentation. torch.compile is left out.

    Args:
        config: the composed configuration.
        world_size: ranks.
        ranks_per_node: of them; at most `world_size` are used.
        device: short name of a GPU in `foundry.rehearsal.machine.GPUS`.
        steps: the run ends at this optimizer step.
        run_dir: run directory, which may hold a run to resume; None: a temporary one.
        shortens: evaluate one microbatch per rank at the end, without samples, and save only a checkpoint of up to
            1 GiB. If false, evaluation, schedule and checkpoints are as configured.
        ask: has a process rehearse a request; None: a new one.

    Raises:
        ConfigError: a setting is wrong or cannot be rehearsed, the GPU is unknown, or there is no compiler for the
            device guard.
        RehearsalError: the run fails; its message has the reason and the traceback.
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
            shortens=shortens,
        )
        return read_answer((ask or _ask_new_process)(request, folder))


def _ask_new_process(request: Request, folder: Path) -> dict[str, Any]:
    asked, answered = folder / "request.json", folder / "answer.json"
    asked.write_text(json.dumps(asdict(request)))
    command = [sys.executable, "-P", "-m", "foundry.rehearsal.child", str(os.getpid()), str(asked), str(answered)]
    done = subprocess.run(command, env=environment_of_module(), capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(answered.read_text())
    except FileNotFoundError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RehearsalError(f"the process of the rehearsal has ended without an answer: {last}") from None
    return answer


def check_rehearsal(
    config: Config, *, world_size: int, ranks_per_node: int = 8, device: str = "h100", steps: int = 2, prefix: str = ""
) -> None:
    """Refuse a rehearsal that cannot be had, before anything is built or read.

    Args:
        config: of the run.
        world_size: ranks.
        ranks_per_node: of them.
        device: short name of a GPU.
        steps: the rehearsal ends at this optimizer step.
        prefix: of the names of these arguments in messages, such as "plan.".

    Raises:
        ConfigError: the strategy cannot be rehearsed, the GPU is unknown, the nodes are not full, or there is no
            compiler for the device guard.
    """
    find_gpu(device, f"{prefix}device")
    if world_size % (per_node := min(ranks_per_node, world_size)):
        message = f"is {per_node} but must divide the {world_size} ranks"
        raise ConfigError(Violation(f"{prefix}ranks_per_node", message))
    take_steps(config, steps, world_size)
    if reason := reason_not_to_load():
        raise ConfigError(Violation(f"{prefix}rehearse", f"is not possible: {reason}"))
