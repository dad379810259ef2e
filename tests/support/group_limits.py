"""A tracker that writes down how long a collective may take, of each process group that its process is in."""

import json

import torch.distributed as dist


class Limits:
    def __init__(self, run_dir, **names):
        self._file = run_dir / "limits.jsonl"

    def on_start(self, started):
        self._write("start")

    def on_step(self, logged):
        self._write(logged.step)

    def _write(self, when):
        groups = list[tuple[int, list[float]]]()
        for group in dist.distributed_c10d._world.pg_map:
            backends = [group._get_backend(device) for device in group._device_types]
            groups.append((group.size(), [backend.options._timeout.total_seconds() for backend in backends]))
        with self._file.open("a") as file:
            file.write(json.dumps([when, groups]) + "\n")
