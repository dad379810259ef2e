"""Expansion of the overrides of a sweep into jobs."""

import itertools

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.sweeper import Sweep
from foundry.core.errors import ConfigError
from foundry.sweeps.grid import expand


def parse(*words):
    return OverridesParser.create().parse_overrides(list(words))


def jobs(*words, zipped=(), excluded=()):
    return expand(parse(*words), Sweep(zip=list(zipped), exclude=list(excluded)))


def refusal(*words, zipped=(), excluded=()):
    with pytest.raises(ConfigError) as refused:
        jobs(*words, zipped=zipped, excluded=excluded)
    return [str(violation) for violation in refused.value.violations]


@pytest.mark.parametrize(
    "words",
    [
        ["a=1"],
        ["a=1,2", "b=x", "c=range(1,4)"],
        ["a=1e-3,0.5", "+b='q,r',s", "~c", "d=[1,2],[3]", "e={x:1},{y:2}"],
        ["a=1,2", "a=3,4,5"],
        ["g/h=x,y", "g@p=z"],
    ],
)
def test_grid_without_options_equals_hydras_grid(words):
    (expected,) = BasicSweeper.split_arguments(parse(*words), max_batch_size=None)
    assert [list(job.overrides) for job in jobs(*words)] == expected


def test_label_and_id_of_a_job_have_its_swept_overrides():
    first, second = jobs("lr=1e-3,2e-3", "steps=5")
    assert (first.overrides, first.swept) == (("lr=0.001", "steps=5"), ("lr=0.001",))
    assert str(second) == "lr=0.002"
    assert first.id != second.id


def test_job_id_depends_only_on_its_swept_values():
    """More values, fixed overrides, the order of keys and values, and the notation of numbers do not change the id."""
    ids = {job.id for job in jobs("lr=1e-3,2e-3", "seed=1,2")}
    assert ids < {job.id for job in jobs("seed=2,3,1", "lr=0.002,0.0010,3e-3", "steps=9")}
    assert len(ids) == 4


def test_zip_pairs_the_values_of_its_keys():
    words = [job.overrides for job in jobs("lr=1,2,3", "opt=x,y", "seed=7,8,9", zipped=[["lr", "seed"]])]
    assert words == [(f"lr={k}", f"opt={o}", f"seed={k + 6}") for k in (1, 2, 3) for o in ("x", "y")]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=4, max_size=4), pairs=st.sampled_from([(0, 1), (1, 3), (0, 3)]))
def test_zip_selects_points_of_the_full_grid(lengths, pairs):
    keys, (one, other) = ["a", "b", "c", "d"], pairs
    lengths[other] = lengths[one]
    words = [f"{key}=choice({','.join(map(str, range(n)))})" for key, n in zip(keys, lengths, strict=True)]
    zipped = [job.overrides for job in jobs(*words, zipped=[[keys[one], keys[other]]])]
    points = itertools.product(*(range(n) for n in lengths))
    expected = [
        tuple(f"{k}={v}" for k, v in zip(keys, point, strict=True)) for point in points if point[one] == point[other]
    ]
    assert sorted(zipped) == sorted(expected)


def test_excluded_combinations_are_left_out():
    left = [str(job) for job in jobs("lr=1e-2,1e-3", "optimizer=sgd,adamw", excluded=["lr=0.010 optimizer=sgd"])]
    assert left == ["lr=0.01, optimizer=adamw", "lr=0.001, optimizer=sgd", "lr=0.001, optimizer=adamw"]


def test_exclude_may_name_a_fixed_override():
    assert [str(job) for job in jobs("lr=1,2", "opt=sgd", excluded=["opt=sgd lr=1"])] == ["lr=2"]


def test_swept_values_may_contain_spaces_commas_slashes_and_quotes():
    values = ["'a b'", '"c,d"', "e/f", "[1,2]", "'it\\'s'"]
    expected = [f"x={value}" for value in values]
    assert [job.overrides for job in jobs(f"x={','.join(values)}")] == [(word,) for word in expected]
    left = jobs(f"x={','.join(values)}", "y=1,2", excluded=[f"{word} y=1" for word in expected])
    assert [job.overrides for job in left] == [(word, "y=2") for word in expected]


def test_zip_and_exclude_accept_options_of_config_groups():
    words = ["optimizer=adamw,muon,sgd", "hparams.lr=1,2,3"]
    zipped = jobs(*words, zipped=[["optimizer", "hparams.lr"]], excluded=["optimizer=sgd"])
    assert [str(job) for job in zipped] == ["optimizer=adamw, hparams.lr=1", "optimizer=muon, hparams.lr=2"]


def test_shuffled_values_make_the_same_jobs():
    assert {job.id for job in jobs("a=shuffle(range(5))")} == {job.id for job in jobs("a=range(5)")}


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["a=range(5,5)"], {}, "a: is range(5,5), which gives no value"),
        (["a=1,2", "b=1,2,3"], {"zipped": [["a", "b"]]}, "different lengths: a has 2 and b has 3; give each"),
        (["a=1,2", "b=3"], {"zipped": [["a", "b"]]}, "names b, which is not swept; swept keys: a"),
        (["hparams.lr=1,2"], {"zipped": [["hparams.rl"]]}, "did you mean hparams.lr?"),
        (["a=1,2", "b=1,2"], {"zipped": [["a", "b"], ["b"]]}, "names b more than once"),
        (["a=1,2"], {"excluded": ["a=3"]}, "'a=3', which matches no job of the sweep"),
        (["a=1,2"], {"excluded": ["a"]}, "not of the form key=value"),
        (["a=1,2"], {"excluded": [""]}, "no job"),
        (["a=1,2"], {"excluded": ["a=1", "a=2"]}, "excludes all 2 jobs"),
        (["a=1e-3,0.001"], {}, "a: sweeps over 0.001 twice"),
        (["a=interval(0,1)"], {}, "a: is interval(0,1), which cannot be enumerated"),
    ],
)
def test_grid_error_is_one_line(words, options, message):
    (line,) = refusal(*words, **options)
    assert message in line
    assert "\n" not in line


def test_grid_reports_all_errors_at_once():
    assert len(refusal("a=1,2", "b=1,2,3", zipped=[["a", "b", "c"], ["a"]])) == 3
    assert len(refusal("a=1,2", excluded=["a=3", "a"])) == 2
