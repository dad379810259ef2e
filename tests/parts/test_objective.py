"""The base class of objectives, and objects of other classes that get its defaults."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import foundry
from foundry.config.build import build
from foundry.core import protocols
from foundry.core.errors import ConfigError
from foundry.core.protocols import LossSum, Objective
from foundry.parts.objective import build_objective, with_defaults

OPTIONAL = ("compare", "generate", "predict", "build_source")


class Squared(Objective):
    def num_valid(self, microbatch):
        return len(microbatch["position"])

    def loss(self, model, microbatch):
        return LossSum(model(microbatch["x"]).square().sum())


class Plain:
    num_valid, loss = Squared.num_valid, Squared.loss


class Drawing(Plain):
    """An objective with three optional members: an attribute, a method and a property."""

    columns = ("reference",)

    def generate(self, model, data, device):
        return "drawn"

    @property
    def frozen_models(self):
        raise LookupError("read when a run starts")


class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class PlainModule(nn.Module):
    num_valid, loss = Squared.num_valid, Squared.loss


@dataclass(frozen=True)
class Frozen:
    num_valid, loss = Squared.num_valid, Squared.loss
    metrics: tuple[str, ...] = ("error",)


class Slotted:
    __slots__ = ()
    num_valid, loss = Squared.num_valid, Squared.loss


@pytest.mark.parametrize("make", [Squared, Plain, PlainModule, Frozen])
def test_every_optional_objective_member_has_a_default(make):
    objective = with_defaults(make())
    assert type(objective) is make
    assert [getattr(objective, name) for name in OPTIONAL] == [None] * 4
    assert (objective.columns, objective.forward_keywords, objective.recorded_models) == ((), (), ())
    assert (objective.reads_log_probs, objective.asks_for_loss, objective.makes_samples) == (False, False, False)
    assert objective.metrics == (("error",) if make is Frozen else None)
    assert dict(objective.frozen_models) == {}
    assert objective.bytes_for_samples(None, 3, 4) == 0
    assert objective.example(2, 3)["tokens"].shape == (2, 3)
    part = {"x": torch.ones(2), "position": torch.arange(2)}
    assert (objective.num_valid(part), objective.loss(lambda x: 3 * x, part).loss) == (2, 18)
    with pytest.raises(
        NotImplementedError, match=f"{make.__name__} declares columns but does not implement precompute"
    ):
        objective.precompute(part)


def test_plain_objective_keeps_its_own_members():
    objective = with_defaults(Drawing())
    assert objective.generate(None, None, None) == "drawn"
    assert objective.columns == ("reference",)
    assert objective.compare is None
    with pytest.raises(LookupError):
        objective.frozen_models  # noqa: B018


def test_wrapped_objective_delegates_members_to_the_inner_one():
    objective = with_defaults(Wrapper(foundry.NextToken()))
    assert (objective.reads_log_probs, objective.columns) == (True, ())
    assert objective.generate == objective.inner.generate
    assert with_defaults(Wrapper(Plain())).generate is None


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (object(), "returns an object of type object without num_valid() and loss(); derive it from foundry.Objective"),
        (SimpleNamespace(num_valid=len), "returns an object of type SimpleNamespace without loss(); derive it from"),
        (
            Slotted(),
            "returns an object of type Slotted, which does not allow new attributes; derive it from foundry.Objective",
        ),
    ],
)
def test_objects_without_num_valid_or_loss_are_refused(part, message):
    with pytest.raises(ConfigError) as error:
        with_defaults(part)
    assert f"objective._target_: {message}" in str(error.value)
    assert "\n" not in str(error.value)


class OldRecord(Squared):
    """Its `record` takes the arguments of an earlier version."""

    rollouts = object()

    def record(self, model, tokens, targets):
        return {}


class NoModel(Plain):
    def loss(self, microbatch):
        return LossSum(microbatch["x"].sum())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OldRecord,
            "OldRecord, whose record(model, tokens, targets) does not accept a call of record(model, microbatch)",
        ),
        (NoModel, "NoModel, whose loss(microbatch) does not accept a call of loss(model, microbatch)"),
        (
            lambda: Wrapper(NoModel()),
            "Wrapper, whose loss(microbatch) does not accept a call of loss(model, microbatch)",
        ),
    ],
)
def test_methods_that_do_not_accept_the_arguments_of_a_run_are_refused(kind, message):
    with pytest.raises(ConfigError) as error:
        with_defaults(kind())
    assert str(error.value) == f"objective._target_: returns an object of type {message}"


def test_objective_subclass_without_a_loss_is_abstract():
    class Half(Objective):
        num_valid = Squared.num_valid

    with pytest.raises(TypeError, match=r"abstract method '?loss"):
        Half()


def test_configured_objective_gets_the_defaults(monkeypatch):
    monkeypatch.setattr("foundry.parts.objective.build", lambda node, optional: build({"_target_": node}))
    for name, kind in (("Squared", Squared), ("Plain", Plain)):
        config = SimpleNamespace(objective=f"{__name__}.{name}", peft=None)
        assert type(objective := build_objective(config.objective, config.peft)) is kind
        assert objective.build_source is None


def test_builtin_objectives_derive_from_the_base_class():
    assert foundry.Objective is Objective is protocols.Objective
    names = ("NextToken", "SFT", "DPO", "GRPO", "Distillation", "Diffusion", "DiffusionPolicy", "FlowPolicy")
    assert all(issubclass(getattr(foundry, name), Objective) for name in (*names, "ActionRegression"))


@pytest.mark.parametrize("kind", ["Comparing", "Generative", "Precomputing", "Predicting", "Sourcing"])
def test_earlier_protocol_names_are_the_objective_base_class(kind):
    exec(f"from foundry.core.protocols import {kind}Objective as found", scope := {})
    assert scope["found"] is Objective
