import functools
import math

import pytest

from foundry.config.build import build, check_methods
from foundry.core.errors import ConfigError

HERE = "test_build"


def plain(*, model, size):
    return {"model": model, "size": size}


def anything(**given):
    return given


def asking(*, model, precision, size=1):
    return {"model": model, "precision": precision, "size": size}


def with_its_own(*, model, precision="high"):
    return {"model": model, "precision": precision}


@functools.wraps(asking)
def wrapped(*args, **kwargs):
    return asking(*args, **kwargs)


class Part:
    def __init__(self, model, precision=None):
        self.model, self.precision = model, precision


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"_target_": f"{HERE}.plain", "size": 3}, {"model": "m", "size": 3}),
        ({"_target_": f"{HERE}.anything", "size": 3}, {"model": "m", "size": 3}),
        ({"_target_": f"{HERE}.asking"}, {"model": "m", "precision": "fp32", "size": 1}),
        ({"_target_": f"{HERE}.wrapped"}, {"model": "m", "precision": "fp32", "size": 1}),
        ({"_target_": f"{HERE}.with_its_own", "precision": "low"}, {"model": "m", "precision": "low"}),
    ],
    ids=["plain", "keywords", "asking", "wrapped", "own field"],
)
def test_build_passes_offered_arguments_to_functions_that_name_them(node, expected):
    assert build(node, optional={"precision": "fp32"}, model="m") == expected


def test_build_passes_offered_arguments_that_a_constructor_names():
    assert vars(build({"_target_": f"{HERE}.Part"}, optional={"precision": "fp32"}, model="m"))["precision"] == "fp32"


def test_build_offers_nothing_to_a_builtin_without_a_signature():
    assert build({"_target_": "builtins.dict", "size": 3}, optional={"precision": "fp32"}) == {"size": 3}
    assert math.isnan(build({"_target_": f"{HERE}.anything"}, optional={"x": 0.0}, y=math.nan)["y"])


class Calls:
    """Base class of parts with two methods."""

    limit = 3

    def first(self, model, batch):
        raise NotImplementedError

    def second(self):
        raise NotImplementedError

    def _private(self):
        raise NotImplementedError


class Exact:
    def first(self, model, batch):
        return model

    @staticmethod
    def second():
        return 1


class Wide:
    limit = None

    def first(self, *values, **more):
        return values

    def second(self, seed=0, *, verbose=False):
        return seed


class Renamed(Calls):
    def first(self, network, samples):
        return network


class WithAttributes:
    def __init__(self):
        self.first, self.second = functools.partial(max, 1), dict


class Delegating:
    def __getattr__(self, name):
        return getattr(Exact(), name)


class NoSecond:
    first = Exact.first


class SecondIsANumber(NoSecond):
    second = 2


class FewArguments(Exact):
    def first(self, batch):
        return batch


class ManyArguments(Exact):
    def second(self, model, *, name: str) -> int:
        return 1


class ByName(Exact):
    def first(self, *, model, batch):
        return model


@pytest.mark.parametrize("kind", [Exact, Wide, Renamed, WithAttributes, Delegating])
def test_methods_that_accept_the_arguments_of_the_base_pass(kind):
    check_methods(kind(), Calls, "part._target_")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (NoSecond, "NoSecond, which has no method second()"),
        (SecondIsANumber, "SecondIsANumber, which has no method second()"),
        (FewArguments, "FewArguments, whose first(batch) does not accept a call of first(model, batch)"),
        (ManyArguments, "ManyArguments, whose second(model, *, name) does not accept a call of second()"),
        (ByName, "ByName, whose first(*, model, batch) does not accept a call of first(model, batch)"),
    ],
)
def test_other_methods_are_refused_with_their_arguments(kind, problem):
    with pytest.raises(ConfigError) as error:
        check_methods(kind(), Calls, "part._target_")
    assert str(error.value) == f"part._target_: returns an object of type {problem}"
