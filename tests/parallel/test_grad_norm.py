import math

import torch

from foundry.parallel.grad_norm import clip_grad_norm_


def parameters_with(*grads):
    result = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(result, grads, strict=True):
        parameter.grad = grad
    return [*result, torch.nn.Parameter(torch.zeros(3))]


def test_norm_and_clipping_agree_with_torch():
    torch.manual_seed(0)
    grads = [torch.randn(5, 7), torch.randn(11), torch.randn(())]
    ours, theirs = parameters_with(*(g.clone() for g in grads)), parameters_with(*(g.clone() for g in grads))
    norm = clip_grad_norm_(ours, 0.3)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.3, foreach=False)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_small_gradient_is_not_scaled_up():
    parameters = parameters_with(torch.tensor([0.3, 0.4]))
    norm = clip_grad_norm_(parameters, 1.0)
    assert norm.item() == 0.5
    assert parameters[0].grad.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_grad_norm_of_mixed_dtypes_is_summed_in_fp32():
    parameters = parameters_with(
        torch.full((4,), 300.0, dtype=torch.float16), torch.full((9,), 2.0, dtype=torch.bfloat16)
    )
    norm = clip_grad_norm_(parameters, 6.0)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, torch.tensor((4 * 300.0**2 + 9 * 4.0) ** 0.5))
    assert parameters[0].grad.dtype is torch.float16


def test_grad_norm_is_zero_without_gradients_and_nan_for_nan():
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], math.inf).item() == 0.0
    parameters = parameters_with(torch.tensor([1.0, float("nan")]))
    assert clip_grad_norm_(parameters, math.inf).isnan()
    assert parameters[0].grad[0].item() == 1.0, "nothing is scaled"
