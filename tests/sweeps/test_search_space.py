"""Optuna distributions for the overrides of a search, and overrides for Optuna's proposals."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from foundry.core.errors import ConfigError

distributions = pytest.importorskip("optuna.distributions", reason="needs the extra search")
CategoricalDistribution = distributions.CategoricalDistribution
FloatDistribution, IntDistribution = distributions.FloatDistribution, distributions.IntDistribution
from foundry.sweeps.search.search_space import Dimension, Space  # noqa: E402 - which imports it


def space(*overrides):
    return Space.parse(OverridesParser.create().parse_overrides(list(overrides)))


@pytest.mark.parametrize(
    ("values", "distribution"),
    [
        ("interval(0,0.5)", FloatDistribution(0.0, 0.5)),
        ("tag(log,interval(1e-5,1e-1))", FloatDistribution(1e-5, 1e-1, log=True)),
        ("int(interval(1,8))", IntDistribution(1, 8)),
        ("tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("range(4)", IntDistribution(0, 3)),
        ("range(2,9,3)", IntDistribution(2, 8, step=3)),
        ("range(9,1,-3)", IntDistribution(3, 9, step=3)),
        ("range(0,1,0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("1,2", CategoricalDistribution(["1", "2"])),
        ("choice(adamw,sgd)", CategoricalDistribution(["adamw", "sgd"])),
        ("choice('0.02','a b')", CategoricalDistribution(["0.02", r"a\ b"])),
    ],
)
def test_space_parses_overrides_into_optuna_distributions(values, distribution):
    (dimension,) = space(f"key={values}", "other=3").dimensions
    assert dimension == Dimension("key", distribution)


@pytest.mark.parametrize(
    ("distribution", "value", "override"),
    [
        (FloatDistribution(1e-5, 1e-1, log=True), 0.00123456, "k=0.001235"),
        (FloatDistribution(1e-5, 1e-1, log=True), 1.00001e-5, "k=1e-05"),
        (FloatDistribution(0.12341, 1.0, log=True), 0.12342, "k=0.12341"),  # never below the lower bound
        (FloatDistribution(0.9, 0.99999), 0.987654321, "k=0.987654"),
        (FloatDistribution(0.9999, 0.99999), 0.9999876543, "k=0.999987654"),
        (FloatDistribution(-300.0, 300.0), 12.3456789, "k=12.35"),
        (FloatDistribution(0.0, 0.75, step=0.25), 0.25, "k=0.25"),
        (FloatDistribution(0.5, 0.5), 0.5, "k=0.5"),
        (IntDistribution(1, 10**6), 123456, "k=123456"),
        (CategoricalDistribution(["'a b'"]), "'a b'", "k='a b'"),
    ],
)
def test_dimension_rounds_proposals_to_short_overrides(distribution, value, override):
    assert Dimension("k", distribution).override(value) == override


def test_space_job_has_shared_and_proposed_overrides():
    searched = space("lr=interval(0,1)", "steps=5", "optimizer=adamw,sgd", "steps=7")
    job = searched.job({"lr": 0.25, "optimizer": "sgd"})
    assert job.overrides == ("steps=7", "lr=0.25", "optimizer=sgd")
    assert job.swept == ("lr=0.25", "optimizer=sgd")


def test_corners_include_all_choices_and_both_bounds():
    corners = space("lr=interval(0,1)", "optimizer=adamw,sgd").corners({"lr": 0.5, "optimizer": "sgd"})
    assert [str(job) for job in corners] == [
        "lr=0.5, optimizer=sgd",
        "lr=0.0, optimizer=sgd",
        "lr=1.0, optimizer=sgd",
        "lr=0.5, optimizer=adamw",
        "lr=0.5, optimizer=sgd",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr=1e-3"], "hydra.sweeper.params: has no key to search"),
        (["lr=interval(2,1)"], r"lr: is interval\(2,1\): (`low <= high`|The `low` value must be smaller than)"),
        (["lr=tag(log,interval(0,1))"], "lr: is .*: (`low > 0`|The `low` value must be larger than 0)"),
        (["lr=tag(lgo,interval(1,2))"], "the tag lgo is not supported here; use log"),
        (["lr=tag(log,choice(1,2))"], "the tag log is not supported here"),
        (["lr=range(3,3)"], "the range is empty"),
        (["lr=tag(log,range(1,9,2))"], "lr: is .*: "),
    ],
)
def test_invalid_search_space_is_a_one_line_error(overrides, message):
    with pytest.raises(ConfigError, match=message) as refused:
        space(*overrides)
    assert len(refused.value.violations) == 1


def test_bounds_of_a_long_range_are_found_without_enumeration():
    ranges = space(f"a=range({10**12})", "b=range(5,0,-2)", "c=range(0,1,0.25)")
    bounds = [(d.distribution.low, d.distribution.high) for d in ranges.dimensions]
    assert bounds == [(0, 10**12 - 1), (1, 5), (0.0, 0.75)]
    with pytest.raises(ConfigError, match=r"a: is range\(0,9,0\): has a step of 0"):
        space("a=range(0,9,0)")
