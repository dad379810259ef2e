"""Collective timeouts of the process groups of this process, and a tracker that writes them at start and in steps."""

import json

import torch.distributed as dist


def limits():
    """Return the size of each group and the timeouts of its backends in seconds."""
    groups = list[tuple[int, list[float]]]()
    for group in dist.distributed_c10d._world.pg_map:
        backends = [group._get_backend(device) for device in group._device_types]
        groups.append((group.size(), [backend.options._timeout.total_seconds() for backend in backends]))
    return groups


class Limits:
    def __init__(self, run_dir, **names):
        self._file = run_dir / "limits.jsonl"

    def on_start(self, started):
        self._write("start")

    def on_step(self, logged):
        self._write(logged.step)

    def _write(self, when):
        with self._file.open("a") as file:
            file.write(json.dumps([when, limits()]) + "\n")
