"""Contexts passed to parts of a run: RunContext, SourceContext and EvaluationContext."""

from pathlib import Path

import torch
from support.contexts import evaluation_context, run_context

from foundry.config.schemas.precision import PrecisionMode
from foundry.core.protocols import EvaluationContext, SourceContext
from foundry.parallel.precision import PrecisionPolicy


def test_source_and_evaluation_contexts_inherit_run_attributes():
    run = run_context(seed=7, data=["sample"], judge="judge")
    source = SourceContext.of(run, model=None, batch_size_at=lambda samples: 8, build_loader=None)
    evaluation = EvaluationContext.of(run, step=3, folder=Path("plots"))
    for context in (source, evaluation):
        assert (context.seed, context.data, context.judge, context.world) == (7, ["sample"], "judge", run.world)
    assert (evaluation.step, evaluation.folder, evaluation.files) == (3, Path("plots"), [])


def test_each_evaluation_context_has_its_own_heartbeat_and_files():
    beats, run = [], run_context()
    first, second = (EvaluationContext.of(run, step=s, folder=Path(), heartbeat=beats.append) for s in (1, 2))
    first.files.append(Path("samples.txt"))
    first.heartbeat("evaluating")
    run.heartbeat("training")
    assert (second.files, beats) == ([], ["evaluating"])


def test_beat_is_an_alias_of_heartbeat_in_every_context():
    activities, run = [], run_context()
    context = EvaluationContext.of(run, step=1, folder=Path(), heartbeat=activities.append)
    context.beat("evaluating")
    assert activities == ["evaluating"]
    assert run.beat is run.heartbeat


def test_autocast_of_a_context_uses_the_precision_of_the_run():
    for mode, dtype in ((PrecisionMode.fp32, torch.float32), (PrecisionMode.amp_bfloat16, torch.bfloat16)):
        context = EvaluationContext.of(evaluation_context(), precision=PrecisionPolicy(mode))
        with context.autocast():
            assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
