"""Updates of microbatches, and their comparison."""

import pytest
import torch


def step(model, objective, parts):
    """Return count, mean loss, metrics and gradients of microbatches."""
    model.zero_grad()
    count = sum(map(objective.num_valid, parts))
    losses = [objective.loss(model, part) for part in parts]
    loss = torch.stack([part.loss for part in losses]).sum() / count
    loss.backward()
    metrics = {name: sum(float(part.metrics[name].sum) for part in losses) / count for name in losses[0].metrics}
    return count, float(loss.detach()), metrics, [parameter.grad.clone() for parameter in model.parameters()]


def check_equal(ours, theirs, rounding=1e-6):
    """Compare two results of `step`: equal counts; losses, metrics and gradients up to rounding.

    `rounding` is the relative error of the loss, and the error of a gradient relative to the largest one, or to 1 if
    all are smaller. A metric may be a mean of terms with both signs, as large as the largest metric.
    """
    assert ours[0] == theirs[0] > 0
    assert ours[1] == pytest.approx(theirs[1], rel=rounding, abs=1e-6)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5, abs=1e-6 * max([1.0, *map(abs, theirs[2].values())]))
    largest = max(1.0, max(gradient.abs().max().item() for gradient in theirs[3]))
    for one, other in zip(ours[3], theirs[3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=rounding * largest)
