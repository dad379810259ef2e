"""Optimizer state with nested containers and plain values is restored exactly, or refused."""

import json
import math
from collections import OrderedDict, defaultdict, namedtuple
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_parts import Net, assert_same, stepped, write
from support.examples import examples
from support.nested_optimizer import Nested
from torch import nn
from torch.optim import AdamW, Optimizer

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.nested_state import flatten, tensor_names, unflatten
from foundry.checkpoint.tensors import collect, describe, restore_into

TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]),
)
LEAVES = TENSORS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@settings(max_examples=examples(150), derandomize=True, deadline=None)
@given(value=VALUES)
def test_flatten_and_unflatten_restore_any_supported_value(value):
    node, tensors = flatten(value, "x.", "Own")
    node = json.loads(json.dumps(node, allow_nan=False))
    assert sorted(tensor_names(node)) == sorted(tensors)
    again, places = unflatten(node, lambda name, dtype, on_cpu: tensors[name].clone())
    assert same(value, again)
    assert places.keys() == tensors.keys()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_memory_layout_of_tensors_is_restored(order):
    value = torch.rand(2, 3, 4).permute(order)
    node, tensors = flatten([value], "", "Own")
    ((again,), places) = unflatten(node, lambda name, *_: torch.zeros(tensors[name].shape))
    assert places.popitem()[1] is again
    assert (again.shape, again.stride()) == (value.shape, value.stride())


Pair = namedtuple("Pair", "a b")
UNSUPPORTED = {
    "object": object(),
    "set of objects": {len},
    "function": len,
    "fraction": Fraction(1, 2),
    "complex": 1j,
    "bytes": b"x",
    "dtype": torch.float32,
    "named tuple": Pair(1, 2),
    "defaultdict": defaultdict(int),
    "module": nn.Linear(1, 1),
    "complex tensor": torch.zeros(2, dtype=torch.complex64),
    "sparse tensor": torch.zeros(2, 2).to_sparse(),
    "tuple key": {(1, 2): 3},
    "tensor key": {torch.tensor(1): 3},
}


@pytest.mark.parametrize("depth", ["top", "dict", "list"])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_optimizer_state_is_named(kind, depth):
    value = {"top": lambda v: v, "dict": lambda v: {"in": v}, "list": lambda v: [1, v]}[depth](UNSUPPORTED[kind])
    model = nn.Linear(2, 1, bias=False)
    optimizer = Nested(model.parameters())
    optimizer.state[model.weight]["key"] = value
    for ask in (lambda: collect(model, None, [optimizer]), lambda: describe(model, [optimizer])):
        with pytest.raises(CheckpointError, match=r"Nested keeps optimizer\.weight\.key.* as a .* cannot store"):
            ask()


@pytest.mark.parametrize(
    "node", [None, 3, [], {}, {"tensor": "x"}, {"dict": [1]}, {"float": "?"}, {"list": 3}], ids=str
)
def test_invalid_state_node_is_an_error(node):
    with pytest.raises(CheckpointError, match="cannot be read"):
        unflatten(node, lambda *_: torch.zeros(1))


def test_nested_optimizer_state_resumes_exactly(tmp_path):
    model, other = Net(1), Net(2)
    optimizer = stepped(model, Nested(model.parameters()))
    folder = write(tmp_path, 3, model, optimizers=[optimizer])
    fresh = Nested(other.parameters())
    restore_into(folder, other, None, [fresh])
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert same(optimizer.state[mine], fresh.state[its])
    kept = ("estimate", "scale", "seen")
    assert same([optimizer.param_groups[0][key] for key in kept], [fresh.param_groups[0][key] for key in kept])
    stepped(model, optimizer)
    stepped(other, fresh)
    assert_same(collect(model, None, [optimizer]), collect(other, None, [fresh]))


def test_restored_param_group_keeps_the_settings_of_the_run(tmp_path):
    model = Net(1)
    optimizer = stepped(model, Nested([{"params": list(model.parameters()), "multiplier": 2.0}], lr=0.1))
    folder = write(tmp_path, 3, model, optimizers=[optimizer])
    fresh = Nested([{"params": list(model.parameters()), "multiplier": 3.0}], lr=0.5)
    restore_into(folder, model, None, [fresh])
    assert (fresh.param_groups[0]["multiplier"], fresh.param_groups[0]["lr"]) == (3.0, 0.5)
    assert fresh.param_groups[0]["estimate"] == optimizer.param_groups[0]["estimate"] != 1.0


def test_optimizer_state_before_the_first_step_is_empty(tmp_path):
    model = Net(1)
    folder = write(tmp_path, 0, model, optimizers=[Nested(model.parameters())])
    fresh = Nested(model.parameters())
    restore_into(folder, model, None, [fresh])
    assert not fresh.state


def test_torch_optimizers_need_no_state_description(tmp_path):
    model = Net(1)
    folder = write(tmp_path, 3, model, optimizers=[stepped(model, AdamW(model.parameters(), lr=0.1))])
    assert read_manifest(folder).optimizer == {}


def test_state_of_a_nested_or_flat_optimizer_is_refused_by_the_other(tmp_path):
    model = Net(1)
    nested = write(tmp_path / "nested", 3, model, optimizers=[stepped(model, Nested(model.parameters()))])
    with pytest.raises(CheckpointError, match="has the state of Nested, but AdamW is configured: resume with"):
        restore_into(nested, model, None, [AdamW(model.parameters())])
    flat = write(tmp_path / "flat", 3, model, optimizers=[stepped(model, AdamW(model.parameters()))])
    with pytest.raises(CheckpointError, match="Nested keeps none: resume with"):
        restore_into(flat, model, None, [Nested(model.parameters())])


def test_ordered_dict_is_restored_as_a_dict():
    node, _ = flatten(OrderedDict(a=1), "", "Own")
    assert unflatten(node, lambda *_: torch.zeros(1))[0] == {"a": 1}


class Counting(Optimizer):
    """Keeps an integer per parameter, like optimizers of torch before 1.12."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1


def test_integer_optimizer_state_is_restored(tmp_path):
    model = Net(1)
    folder = write(tmp_path, 3, model, optimizers=[stepped(model, Counting(model.parameters()))])
    fresh = Counting(model.parameters())
    restore_into(folder, model, None, [fresh])
    assert all(state == {"step": 3} for state in fresh.state.values())
    assert len(fresh.state) == len(list(model.parameters()))


class Hooked(Counting):
    """Adds its own values to the state dict by hooks."""

    def __init__(self, params, *, read=True):
        super().__init__(params)
        self.own = {"calls": 0, "scale": torch.tensor(1.0)}
        self.register_state_dict_post_hook(lambda self, message: message.update({"own": self.own | {"pickled": b"x"}}))
        if read:
            self.register_load_state_dict_pre_hook(lambda self, message: self.own.update(message["own"]))

    def step(self):
        super().step()
        self.own["calls"] += 1
        self.own["scale"] = self.own["scale"] * 0.9


def test_state_dict_hooks_are_saved_and_restored(tmp_path):
    model = Net(1)
    optimizer = stepped(model, Hooked(model.parameters()))
    folder = write(tmp_path, 3, model, optimizers=[optimizer])
    fresh = Hooked(model.parameters())
    restore_into(folder, model, None, [fresh])
    assert same(fresh.own, optimizer.own)
    assert fresh.own["calls"] == 3
    with pytest.raises(CheckpointError, match="Hooked adds own to its state dict, but has no hook that loads it"):
        collect(model, None, [stepped(model, Hooked(model.parameters(), read=False))])
