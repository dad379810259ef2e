import functools
import math

import pytest

from foundry.config.build import build

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
