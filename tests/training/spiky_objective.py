"""A diffusion objective with an extreme or NaN loss on selected samples."""

import math

from foundry.core.protocols import LossSum
from foundry.objectives.diffusion import Diffusion


class SpikyDiffusion(Diffusion):
    """Multiplies the loss of microbatches with one of `bad_positions` by 1e4, or by NaN if `not_a_number`."""

    def __init__(self, *, bad_positions, not_a_number, **options):
        super().__init__(**options)
        self._bad = set(bad_positions)
        self._factor = math.nan if not_a_number else 1e4
        self.seen = []

    def loss(self, model, microbatch):
        part = super().loss(model, microbatch)
        positions = microbatch["position"].tolist()
        self.seen += positions if model.training else []
        if model.training and self._bad & set(positions):
            return LossSum(part.loss * self._factor, part.metrics)
        return part
