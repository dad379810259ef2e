"""The options of Muon match an update of single matrices, written out; shards have the same bits as whole matrices."""

import pytest
import torch
from support.composition import EQUAL_RATES, configure
from support.harness import run_ranks
from support.toy import full_tensor
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.fsdp_block import FSDPBlock
from foundry.optim.muon import Muon, normalise_rows
from foundry.optim.optimizers import muon

SHAPES = [(8, 20), (20, 8), (8, 8), (8, 20), (1, 6), (6, 1)]
STEPS = 6
LR, WEIGHT_DECAY, NS_STEPS = 0.05, 0.5, 5
OPTIONS = {"cautious_weight_decay": True, "row_variance_decay": 0.9}
CASES = [{}, *({name: value} for name, value in OPTIONS.items()), OPTIONS]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def momentum_at(step):
    """Return a momentum that rises as in a warm-up."""
    return 0.8 + 0.03 * min(step, 5)


def orthogonalised(matrix):
    """Return the result of the Newton-Schulz iteration in float64."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def written_out(weight, gradients, *, nesterov, cautious_weight_decay=False, row_variance_decay=None):
    """Return a weight after the updates of these gradients, in float64."""
    weight, velocity = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    averages = [0.0] * len(weight)
    for step, gradient in enumerate(gradients):
        momentum = momentum_at(step)
        velocity = momentum * velocity + (1 - momentum) * gradient.double()
        ahead = momentum * velocity + (1 - momentum) * gradient.double() if nesterov else velocity
        update = orthogonalised(ahead)
        if row_variance_decay is not None:
            norm, rows = update.norm(), []
            for number, row in enumerate(update):
                mean_square = float((row**2).mean())
                averages[number] = row_variance_decay * averages[number] + (1 - row_variance_decay) * mean_square
                rows.append(row / averages[number] ** 0.5)
            update = torch.stack(rows)
            update = update * (norm / update.norm())
        update = 0.2 * max(weight.shape) ** 0.5 * update
        decay = WEIGHT_DECAY * weight
        if cautious_weight_decay:
            decay = torch.where(update * weight >= 0, decay, 0.0)
        weight = weight - LR * (update + decay)
    return weight


def train(place=torch.clone, *, ns_dtype=torch.float32, held_in=torch.float32, group=None, nesterov=True, **options):
    """Return the optimizer and the matrices after the steps; `place` distributes a tensor."""
    matrices = [nn.Parameter(place(tensor.to(held_in))) for tensor in draw(0)]
    optimizer = Muon(
        matrices,
        lr=LR,
        momentum=0.5,
        nesterov=nesterov,
        ns_steps=NS_STEPS,
        ns_dtype=ns_dtype,
        weight_decay=WEIGHT_DECAY,
        group=group,
        **options,
    )
    for step in range(STEPS):
        optimizer.param_groups[0]["momentum"] = momentum_at(step)
        for matrix, gradient in zip(matrices, draw(1 + step), strict=True):
            matrix.grad = place(gradient.to(held_in))
        optimizer.step()
    return optimizer, matrices


@pytest.mark.parametrize("options", CASES, ids=lambda options: "+".join(options) or "none")
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_with_options_matches_the_formula(options, nesterov):
    _, matrices = train(nesterov=nesterov, **options)
    gradients = zip(*(draw(1 + step) for step in range(STEPS)), strict=True)
    for matrix, start, given in zip(matrices, draw(0), gradients, strict=True):
        expected = written_out(start, given, nesterov=nesterov, **options)
        assert torch.allclose(matrix.double(), expected, rtol=0, atol=2e-4), tuple(matrix.shape)


def test_each_option_changes_each_matrix():
    """Except that a matrix of one row has the same norm with and without normalization of its row."""
    _, plain = train()
    for name, value in OPTIONS.items():
        _, matrices = train(**{name: value})
        for matrix, other in zip(matrices, plain, strict=True):
            if name == "row_variance_decay" and len(matrix) == 1:
                continue
            assert (matrix - other).abs().max() > 1e-3, (name, tuple(matrix.shape))


def test_rows_are_divided_by_averages_and_the_norm_is_restored():
    update, variance = torch.tensor([[3.0, 4.0], [0.5, 0.0]]), torch.tensor([[1.0], [4.0]])
    ((normalised,), (average,)) = normalise_rows([update], [variance], 0.75)
    assert torch.allclose(average, torch.tensor([[0.75 + 0.25 * 12.5], [3.0 + 0.25 * 0.125]]))
    divided = update / average.sqrt()
    assert torch.allclose(normalised, divided * (update.norm() / divided.norm()))
    assert torch.equal(variance, torch.tensor([[1.0], [4.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_gradient_stay_zero(dtype):
    """Also if the whole matrix is zero, as the gradients before a projection that starts at zero are."""
    update = torch.zeros(3, 4, dtype=dtype)
    for row in (None, 0):
        if row is not None:
            update[row] = 0.5
        ((normalised,), (average,)) = normalise_rows([update], [torch.zeros(3, 1)], 0.95)
        assert normalised.dtype is dtype
        assert average.dtype is torch.float32
        assert torch.allclose(normalised, update, rtol=1e-2)


def test_row_variance_keeps_a_value_for_each_row_in_fp32():
    optimizer, matrices = train(held_in=torch.bfloat16, **OPTIONS)
    for matrix in matrices:
        state = optimizer.state[matrix]
        assert state.keys() == {"momentum_buffer", "row_variance"}
        assert (state["row_variance"].shape, state["row_variance"].dtype) == ((len(matrix), 1), torch.float32)
    optimizer, matrices = train()
    assert optimizer.state[matrices[0]].keys() == {"momentum_buffer"}


def test_muon_with_options_changes_nothing_if_found_inf():
    optimizer, matrices = train(**OPTIONS)
    tensors = [*matrices, *(tensor for matrix in matrices for tensor in optimizer.state[matrix].values())]
    for found in (1.0, 0.0):
        before = [tensor.detach().clone() for tensor in tensors]
        for matrix, gradient in zip(matrices, draw(20), strict=True):
            matrix.grad = gradient * (float("nan") if found else 1.0)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert all(torch.equal(tensor, old) == bool(found) for tensor, old in zip(tensors, before, strict=True))


def different_from_whole(world):
    """Return layout, dtype, shape and name of each tensor whose shards differ from the whole tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    layouts = {
        "rows": lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]),
        "columns": lambda tensor: distribute_tensor(tensor, mesh, [Shard(1)]),
        "plain": torch.clone,
    }
    wrong = []
    for ns_dtype, held_in in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        types = {"ns_dtype": ns_dtype, "held_in": held_in}
        whole = train(**types, **OPTIONS)
        for name, place in layouts.items():
            group = mesh.get_group() if name == "plain" else None
            parts = train(place, group=group, **types, **OPTIONS)
            for one, other in zip(whole[1], parts[1], strict=True):
                pairs = [("weight", one, other)]
                pairs += [(key, one_s, parts[0].state[other][key]) for key, one_s in whole[0].state[one].items()]
                wrong += [
                    (name, ns_dtype, tuple(one.shape), key)
                    for key, a, b in pairs
                    if a.shape != b.shape or not torch.equal(a.detach(), full_tensor(b.detach()))
                ]
    return wrong


@pytest.mark.distributed
def test_options_of_muon_give_the_same_bits_on_shards():
    for wrong in run_ranks(different_from_whole, 2):
        assert wrong == []


class Block(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 10)


@pytest.mark.parametrize(
    ("overrides", "state"),
    [
        ([], {"momentum_buffer"}),
        (["optimizer.row_variance=true", "optimizer.row_variance_decay=0.5"], {"momentum_buffer", "row_variance"}),
    ],
)
def test_row_variance_of_the_settings_reaches_muon(overrides, state):
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    optimizer, _ = muon(configure("optimizer=muon", *EQUAL_RATES, *overrides).optimizer, model=model, lr=1e-2)
    matrix = model[0].layer.weight
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert optimizer.state[matrix].keys() == state
    if "row_variance" in state:  # rows of an orthogonalized (10, 6) matrix have a mean square of about 1 / 10
        assert optimizer.state[matrix]["row_variance"].mean().item() == pytest.approx(0.5 / 10, rel=0.3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.row_variance_decay=0.9"],
            r"variance_decay: is 0\.9 but has no effect without .*variance=true",
        ),
        (["optimizer.row_variance=true", "optimizer.row_variance_decay=1"], r"decay: is 1 but must be below 1"),
        (["optimizer.row_variance=yes please"], r"optimizer\.row_variance"),
        (["optimizer.cautious_weight_decay=maybe"], r"optimizer\.cautious_weight_decay"),
    ],
)
def test_bad_options_of_muon_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure("optimizer=muon", *overrides)
