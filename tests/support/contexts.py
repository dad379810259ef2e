"""Contexts of a run that is not started."""

from pathlib import Path
from types import SimpleNamespace

import torch

from foundry.config.schemas.precision import PrecisionMode
from foundry.core.protocols import EvaluationContext, RunContext
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World


def run_context(*, config=None, world=None, data=None, judge=None, seed=0, per_gpu_batch_size=4, **others):
    """Return the context of a run in fp32, alone unless there is a `world`."""
    hparams = SimpleNamespace(seed=seed, per_gpu_batch_size=per_gpu_batch_size)
    return RunContext(
        config=SimpleNamespace(hparams=hparams) if config is None else config,
        config_hash="",
        world=World.single(torch.device("cpu")) if world is None else world,
        precision=PrecisionPolicy(PrecisionMode.fp32),
        data=data,
        judge=judge,
        run_dir=Path(),
        **others,
    )


def evaluation_context(folder=Path(), *, step=0, **others):
    """Return the context of an evaluation that writes to `folder`; others as for `run_context`."""
    return EvaluationContext.of(run_context(**others), step=step, folder=folder)
