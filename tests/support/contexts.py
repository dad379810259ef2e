"""Run and evaluation contexts without a run."""

from pathlib import Path
from types import SimpleNamespace

import torch

from foundry.config.schemas.precision import PrecisionMode
from foundry.core.protocols import EvaluationContext, RunContext
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World


def run_context(*, config=None, world=None, data=None, judge=None, seed=0, per_gpu_batch_size=4, **fields):
    """Return the context of a run in fp32; `world` defaults to a single process."""
    hparams = SimpleNamespace(seed=seed, per_gpu_batch_size=per_gpu_batch_size, torchcompile=False)
    return RunContext(
        config=SimpleNamespace(hparams=hparams) if config is None else config,
        config_hash="",
        world=World.single(torch.device("cpu")) if world is None else world,
        precision=PrecisionPolicy(PrecisionMode.fp32),
        data=data,
        judge=judge,
        run_dir=Path(),
        **fields,
    )


def evaluation_context(folder=Path(), *, step=0, **fields):
    """Return the context of an evaluation that writes to `folder`; other arguments as for `run_context`."""
    return EvaluationContext.of(run_context(**fields), step=step, folder=folder)
