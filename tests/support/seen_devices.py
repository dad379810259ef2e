"""A tracker that writes the GPUs visible to a run into the run directory."""

import json
import os

import torch


class SeenDevices:
    def __init__(self, run_dir, **names):
        self._run_dir = run_dir

    def on_start(self, event):
        count = torch.cuda.device_count()
        uuid = str(torch.cuda.get_device_properties(0).uuid) if count else None
        seen = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "count": count, "uuid": uuid}
        (self._run_dir / "devices.json").write_text(json.dumps(seen))

    def on_step(self, event):
        pass

    on_evaluation = on_end = on_step
