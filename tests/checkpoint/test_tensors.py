"""Saving and loading tensors on one process: complete, and without pickle."""

import json

import pytest
import torch
from safetensors import safe_open
from support.checkpoint_parts import Net, assert_same, stepped, write
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.tensors import collect, load_weights, read_source_tensors, require_shapes, restore_into
from foundry.core.ema import WeightAverage


def test_loaded_weights_equal_the_saved_weights(tmp_path):
    model, other = Net(1), Net(2)
    load_weights(write(tmp_path, 200, model), other)
    assert_same(model.state_dict(), other.state_dict())


def test_averaged_weights_are_stored_beside_the_weights(tmp_path):
    model = Net(1)
    ema = WeightAverage(model, 0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    ema.update()
    folder = write(tmp_path, 5, model, ema)
    own, averaged = Net(2), Net(3)
    load_weights(folder, own)
    load_weights(folder, averaged, ema=True)
    assert_same(own.state_dict(), model.state_dict())
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in averaged.state_dict().items():
        assert torch.equal(tensor, ema.average[name] if name in parameters else model.state_dict()[name]), name
    assert not torch.equal(averaged.first.weight, own.first.weight)


def test_loading_averages_falls_back_to_the_weights(tmp_path):
    model, other = Net(1), Net(2)
    load_weights(write(tmp_path, 5, model), other, ema=True)
    assert_same(model.state_dict(), other.state_dict())


class Tied(nn.Module):
    """A model whose head shares the matrix of its embedding."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("average", [False, True])
def test_tied_weights_are_saved_once_and_stay_tied(tmp_path, average):
    model, other = Tied(1), Tied(2)
    ema = WeightAverage(model, 0.9) if average else None
    folder = write(tmp_path, 5, model, ema)
    load_weights(folder, other, ema=average)
    assert_same(model.state_dict(), other.state_dict())
    assert other.head.weight is other.embedding.weight
    (shard,) = folder.glob("*.safetensors")
    with safe_open(shard, "pt") as opened:
        assert set(opened.keys()) == {"model.embedding.weight"} | ({"ema.embedding.weight"} if average else set())


def test_checkpoint_files_contain_no_pickle(tmp_path):
    folder = write(tmp_path, 5, Net(1), WeightAverage(Net(1), 0.9))
    names = {"manifest.json", "tensors.json", "shard-00000.safetensors", "rank-00000.json"}
    assert {path.name for path in folder.iterdir()} == names
    with safe_open(folder / "shard-00000.safetensors", "pt") as shard:
        names = set(shard.keys())
    assert json.loads((folder / "rank-00000.json").read_text()) == {"rng": 5}
    parameters = {name for name, _ in Net(1).named_parameters()}
    assert names == {f"model.{name}" for name in Net(1).state_dict()} | {f"ema.{name}" for name in parameters}


OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw_fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adamw_amsgrad": lambda p: AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd_momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_resumes_exactly(tmp_path, kind):
    model, other = Net(1), Net(2)
    optimizer = stepped(model, OPTIMIZERS[kind](model.parameters()))
    folder = write(tmp_path, 3, model, optimizers=[optimizer])
    fresh = OPTIMIZERS[kind](other.parameters())
    restore_into(folder, other, None, [fresh])
    assert_same(collect(model, None, [optimizer]), collect(other, None, [fresh]))
    for mine, its in zip(optimizer.state.values(), fresh.state.values(), strict=False):
        assert {k: (v.shape, v.dtype) for k, v in mine.items() if v is not None} == {
            k: (v.shape, v.dtype) for k, v in its.items() if v is not None
        }
    stepped(model, optimizer)
    stepped(other, fresh)
    assert_same(collect(model, None, [optimizer]), collect(other, None, [fresh]))


def test_parameter_without_a_gradient_has_no_restored_state(tmp_path):
    model, other = Net(1), Net(2)
    optimizer = AdamW(model.parameters())
    model.scale.grad = torch.ones(())
    optimizer.step()
    fresh = AdamW(other.parameters())
    restore_into(write(tmp_path, 1, model, optimizers=[optimizer]), other, None, [fresh])
    assert list(fresh.state) == [other.scale]


class RowMeans(Optimizer):
    """Keeps the mean of each row as state."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("rows", torch.zeros(p.shape[:1]))
                state["rows"] += p.grad.mean(-1)


def test_optimizer_state_of_another_shape_is_restored(tmp_path):
    model, other = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    optimizer = stepped(model, RowMeans(model.parameters()))
    fresh = RowMeans(other.parameters())
    restore_into(write(tmp_path, 3, model, optimizers=[optimizer]), other, None, [fresh])
    assert_same(collect(model, None, [optimizer]), collect(other, None, [fresh]))


def test_state_of_another_optimizer_is_refused(tmp_path):
    model = Net(1)
    folder = write(tmp_path, 3, model, optimizers=[stepped(model, SGD(model.parameters(), lr=0.1, momentum=0.9))])
    with pytest.raises(CheckpointError, match=r"state momentum_buffer, but AdamW keeps exp_avg, exp_avg_sq, step"):
        restore_into(folder, model, None, [AdamW(model.parameters())])
    with pytest.raises(CheckpointError, match=r"AdamW keeps exp_avg, exp_avg_sq, step"):
        restore_into(write(tmp_path, 4, model), model, None, [AdamW(model.parameters())])


@pytest.mark.parametrize("read", [load_weights, lambda folder, model: restore_into(folder, model, None, [])])
def test_missing_unexpected_and_mismatched_tensors_are_named(tmp_path, read):
    small, large = nn.Linear(4, 3, bias=False), nn.Linear(4, 3)
    with pytest.raises(CheckpointError, match=r"step_00000001 lacks model\.bias$"):
        read(write(tmp_path, 1, small), large)
    with pytest.raises(CheckpointError, match=r"has, but this run does not, model\.bias$"):
        read(write(tmp_path, 2, large), small)
    with pytest.raises(CheckpointError, match=r"has model\.weight with shape \(3, 4\), this run with \(5, 4\)"):
        read(write(tmp_path, 3, nn.Linear(4, 3)), nn.Linear(4, 5))


def test_unexpected_averages_are_named(tmp_path):
    model = Net(1)
    with pytest.raises(CheckpointError, match=r"does not, ema\.first\.bias, .* and 2 more$"):
        restore_into(write(tmp_path, 1, model, WeightAverage(model, 0.9)), model, None, [])


def test_source_tensors_are_stored_apart_from_the_model(tmp_path):
    model, other = Net(1), Net(2)
    source = {"log_probs": torch.randn(3, 4), "answers": torch.arange(5), "none": torch.empty(0, 2)}
    folder = write(tmp_path, 3, model, source=source)
    restore_into(folder, other, None, [])
    assert_same(model.state_dict(), other.state_dict())
    assert_same(read_source_tensors(folder), source)
    assert read_source_tensors(write(tmp_path, 4, model)) == {}


def test_shapes_are_checked_on_the_meta_device(tmp_path):
    folder = write(tmp_path, 1, nn.Linear(4, 3))
    with torch.device("meta"):
        require_shapes(folder, nn.Linear(4, 3))
        for other in (nn.Linear(10**6, 10**6), nn.Linear(4, 3, bias=False), nn.Sequential(nn.Linear(4, 3))):
            with pytest.raises(CheckpointError, match=r"this run|lacks"):
                require_shapes(folder, other)
