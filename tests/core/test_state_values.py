"""Reading untrusted saved state: an invalid value raises a ValueError that names it, or a ConfigError."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundry.checkpoint.folder import Manifest
from foundry.checkpoint.resume_point import ResumePoint
from foundry.checkpoint.rng import rng_state, set_rng_state
from foundry.core.errors import ConfigError
from foundry.core.progress import Progress
from foundry.core.state_values import read_count, read_numbers, read_optional_count, read_optional_number

CPU = torch.device("cpu")
COUNTS = st.integers(0, 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def is_count(value):
    return type(value) is int and 0 <= value < 2**63


@given(JSON | COUNTS)
def test_read_count_accepts_only_non_negative_integers(value):
    for read, is_valid in ((read_count, is_count(value)), (read_optional_count, value is None or is_count(value))):
        if is_valid:
            assert read({"steps": value}, "steps") == value
        else:
            with pytest.raises(ValueError, match=r"^steps=.* is not a non-negative whole number"):
                read({"steps": value}, "steps")


@given(NUMBERS)
def test_finite_numbers_are_read_unchanged(value):
    assert read_optional_number({"best": value}, "best") == value
    assert read_numbers({"losses": [value]}, "losses") == [value]


@pytest.mark.parametrize("value", ["x", True, [1], {}, float("nan"), float("inf"), 10**400])
def test_non_finite_and_non_numeric_values_are_rejected(value):
    with pytest.raises(ValueError, match=r"^best=.* is neither a finite number nor null"):
        read_optional_number({"best": value}, "best")
    with pytest.raises(ValueError, match=r"^losses=.* is not a list of finite numbers"):
        read_numbers({"losses": [value]}, "losses")


STATES = ["x", None, [], {}, {"steps": "x"}, {"steps": -1, "samples": 0}, {"steps": 1e300, "samples": 0}]
STATES += [{"steps": [1], "samples": 0}, {"steps": 1, "samples": None}, {"steps": 1, "samples": 1, "tokens": "x"}]
DRAWN = json.loads(json.dumps(rng_state(CPU)))
GENERATORS = [{}, [], "x", None, {**DRAWN, "torch": 5}, {**DRAWN, "torch": "x"}, {**DRAWN, "python": []}]
GENERATORS += [{**DRAWN, "python": [3, ["a"], None]}, {**DRAWN, "python": [3, [0] * 625, "x"]}, {**DRAWN, "numpy": [1]}]


def load_progress(state):
    Progress(samples_per_epoch=10, tokens_per_sample=None).load_state_dict(state)


@pytest.mark.parametrize(
    ("load", "state"),
    [
        *((load_progress, state) for state in STATES),
        *((lambda state: set_rng_state(state, CPU), state) for state in GENERATORS),
    ],
)
def test_malformed_checkpoint_state_is_a_config_error(load, state):
    before, generators = random.getstate(), torch.get_rng_state()
    with pytest.raises(ConfigError) as refused, ResumePoint(Path("run"), Manifest(step=1)).reading():
        load(state)
    (violation,) = refused.value.violations
    assert violation.key == "checkpoint.resume"
    assert str(violation).startswith("checkpoint.resume: leads to run, whose state is invalid: ")
    assert str(violation).isprintable()
    random.setstate(before)
    torch.set_rng_state(generators)
