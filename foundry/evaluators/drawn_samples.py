"""Evaluator that generates samples for people to look at."""

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from foundry.core.protocols import EvaluationContext, Objective
from foundry.generation.text_samples import TextSamples
from foundry.parallel.whole_weights import gathered_if_they_fit
from foundry.run_dir.files import make_folder

_log = logging.getLogger(__name__)


class DrawnSamples:
    """Generates samples; rank 0 saves them as samples_<step>, and again as samples, which always has the newest.

    Args:
        objective: objective with `generate`.
        data: data passed to `generate`.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, *, objective: Objective, data: Any) -> None:
        assert objective.generate is not None, "the objective draws samples"
        self._generate, self._data = objective.generate, data

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Generate and save samples; returns no metrics."""
        with gathered_if_they_fit(model, context.world) as full_model:
            # One heartbeat per token or per denoising step, since a single step can take long in a large model.
            hook = full_model.register_forward_pre_hook(lambda module, inputs: context.heartbeat("drawing samples"))
            try:
                with context.autocast():
                    samples = self._generate(full_model, self._data, context.world.device)
            finally:
                hook.remove()
        if not context.world.is_main:
            return {}
        if isinstance(samples, TextSamples):
            samples = replace(samples, step=context.step)
        folder = context.folder
        try:
            make_folder(folder)
            samples.save(folder / f"samples_{context.step:08d}")
            context.files.append(samples.save(folder / "samples"))
        except OSError as error:
            _log.warning("could not write samples: %s (the run continues)", error)
        return {}
