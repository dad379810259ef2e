"""Imports of the fork server for warm processes: all modules that a small run imports, and Hydra's plugins.

The list includes torch's compiler, which torch's own optimizers always import (foundry's do not).
"""

import gc
import importlib
import os
from pathlib import Path

from support.unsynced import skip_fsync

MODULES = (
    "diffusers",
    "foundry.checkpoint.saver",
    "foundry.commands.main",
    "foundry.commands.train",
    "foundry.data.images.digits",
    "foundry.data.corpora.text",
    "foundry.diff",
    "foundry.evaluators.drawn_samples",
    "foundry.evaluators.held_out",
    "foundry.export",
    "foundry.launch.local",
    "foundry.launch.start",
    "foundry.models.dit",
    "foundry.models.transformer",
    "foundry.objectives.diffusion",
    "foundry.objectives.next_token",
    "foundry.optim.muon",
    "foundry.optim.optimizers",
    "foundry.optim.schedules",
    "foundry.plan",
    "foundry.report",
    "foundry.sample",
    "foundry.sweeps.sweeper",
    "foundry.sync",
    "foundry.tracking.plots",
    "foundry.engine.train",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.profiler",
)


def _import_all():
    for name in MODULES:
        importlib.import_module(name)
    from foundry.config.composition.choices import keep_choices
    from support.composition import CHOICES, compose
    from support.tiny import TINY_DIT, TINY_LM

    untracked = ["tracking=none"]
    for words in ((), (), TINY_LM, TINY_DIT, [*TINY_LM, *untracked], [*TINY_DIT, *untracked]):
        compose(*words)  # loads Hydra's plugins and caches options
    keep_choices(CHOICES)
    # Remove the entry of PYTHONPATH that made this module importable.
    ours = str(Path(__file__).parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", ours)]
    os.environ.pop("PYTHONPATH", None)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


# Only in the fork server, which finds this folder through PYTHONPATH.
if str(Path(__file__).parents[1]) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    _import_all()
    skip_fsync()
    gc.freeze()  # so that forks do not collect, and thereby copy, these objects
    gc.set_threshold(10_000, 10, 10)
