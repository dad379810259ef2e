"""Differences between the config of a checkpoint and the config of the run that resumes it."""

import copy
import json
from dataclasses import MISSING, fields, is_dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.composition import configure
from support.examples import examples

from foundry.config.record.frozen import plain
from foundry.config.record.resume_compat import differences
from foundry.core.errors import contrast
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import encode


def recorded(config):
    return json.loads(encode(plain(config)))


def schema_fields(node, prefix=()):
    """Yield the keys of all typed settings of a config."""
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value):
            yield from schema_fields(value, (*prefix, item.name))
        else:
            yield (*prefix, item.name)


CONFIG = configure()
KEYS = [key for key in schema_fields(CONFIG) if key[-1] != "_target_"]


def without(config, key):
    config = copy.deepcopy(config)
    node = config
    for part in key[:-1]:
        node = node[part]
    del node[key[-1]]
    return config


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_setting_missing_in_the_checkpoint_counts_as_its_default(key):
    now = recorded(CONFIG)
    was = without(now, key)
    item = {item.name: item for item in fields(_owner(key))}[key[-1]]
    value = plain(item.default if item.default is not MISSING else item.default_factory())
    expected = [] if value == _at(now, key) or str(value).startswith("${") else [".".join(key)]
    assert [difference.key for difference in differences(was, now, CONFIG)] == expected


def _owner(key):
    node = CONFIG
    for part in key[:-1]:
        node = getattr(node, part)
    return node


def _at(config, key):
    for part in key:
        config = config[part]
    return config


@pytest.mark.parametrize("group", ["guard", "evaluation", "checkpoint", "tracking", "distributed"])
def test_group_missing_in_the_checkpoint_is_no_difference(group):
    now = recorded(configure())
    was = {key: value for key, value in now.items() if key != group}
    assert list(differences(was, now, CONFIG)) == []


@pytest.mark.parametrize("path", [(), ("hparams",), ("model",), ("optimizer",), ("evaluation", "early_stopping")])
def test_removed_setting_is_reported_and_allowed(path):
    was = recorded(CONFIG)
    _at(was, path)["forgotten"] = 3
    (difference,) = differences(was, recorded(CONFIG), CONFIG)
    assert difference.is_allowed
    assert str(difference) == ".".join((*path, "forgotten")) + ": 3 -> no longer a setting"


def test_settings_of_another_strategy_do_not_count_as_removed():
    one, other = (configure(f"distributed={name}") for name in ("ddp", "fsdp"))
    found = list(differences(recorded(one), recorded(other), other))
    assert {"distributed.strategy", "distributed.bucket_cap_mb"} <= {difference.key for difference in found}
    assert all(difference.is_allowed and not difference.is_removed for difference in found)


def test_non_default_value_of_a_new_setting_is_rejected():
    config = configure("hparams.ema_decay=0.9")
    was = without(recorded(config), ("hparams", "ema_decay"))
    (difference,) = differences(was, recorded(config), config)
    assert (difference.key, difference.old, difference.new, difference.is_allowed) == (
        "hparams.ema_decay",
        None,
        0.9,
        False,
    )


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        ([0.7, 0.3], [7.0, 3.0], True),
        ([70, 30], [0.7, 0.3], True),
        ([0.1, 0.2], [1e-5, 2e-5], True),
        ([1 / 3, 1 / 3], [1.0, 1.0], True),
        ([0.7, 0.3], [3.0, 7.0], False),
        ([0.7, 0.3], [7.0, 3.0000001], False),
        ([0.7], [7.0, 3.0], False),
        ([0.7, 0.3, 0.0], [7.0, 3.0, 0.0], False),
        ([0.7, "x"], [7.0, 3.0], False),
        ([True, 3], [1.0, 3.0, 1.0], False),
        ([10**400, float("nan")], [7.0, 3.0], False),
        ([], [7.0, 3.0], False),
        ({"a": 7, "b": 3}, [7.0, 3.0], False),
        (None, [7.0, 3.0], False),
    ],
)
def test_data_weights_are_compared_as_proportions(was, now, is_same):
    stored, config = (
        {"data": {"_target_": "foundry.data.corpora.text.text_files", "weights": each}} for each in (was, now)
    )
    assert [difference.key for difference in differences(stored, config)] == ([] if is_same else ["data.weights"])


@pytest.mark.parametrize(
    ("was", "now", "keys"),
    [
        (10, "10 epoch_steps", []),
        ("10", "10", []),
        (10, "10 steps", ["evaluation.interval"]),
        (10, "20", ["evaluation.interval"]),
        ("10 epoch_steps", "10", ["evaluation.interval"]),
        (0.5, "10", ["evaluation.interval"]),
    ],
)
def test_evaluation_interval_may_change_and_notations_are_equivalent(was, now, keys):
    config = configure(f"evaluation.interval={now}")
    stored = recorded(config)
    stored["evaluation"]["interval"] = was
    found = list(differences(stored, recorded(config), config))
    assert [difference.key for difference in found] == keys
    assert all(difference.is_allowed for difference in found)


def test_interval_counted_per_epoch_by_an_earlier_version_is_rejected():
    config = configure("evaluation.interval=10")
    stored = recorded(config)
    stored["evaluation"]["interval"] = 10
    (difference,) = differences(stored, recorded(config), config)
    assert not difference.is_allowed
    assert str(difference) == "evaluation.interval: 10 epoch_steps -> 10"
    assert str(difference.violation()) == (
        "evaluation.interval: is 10, which counts steps of the run, but an earlier version of foundry started this run "
        "and counted 10 steps from the start of each epoch; set '10 epoch_steps' to keep that, or '10 steps'"
    )


@pytest.mark.parametrize("key", ["data.weights", "environment.weights"])
def test_weights_of_custom_parts_are_compared_exactly(key):
    group, name = key.split(".")
    stored, config = ({group: {"_target_": "mine.Part", name: each}} for each in ([0.7, 0.3], [7, 3]))
    assert [difference.key for difference in differences(stored, config)] == [key]


def test_settings_of_a_custom_part_have_no_defaults():
    config = replace(CONFIG, model={"_target_": "mine.Model", "own": 1})
    was = without(recorded(config), ("model", "own"))
    (difference,) = differences(was, recorded(config), config)
    assert (difference.key, difference.is_allowed) == ("model.own", False)
    (difference,) = differences(recorded(config), was, config)
    assert (difference.key, difference.is_removed, difference.is_allowed) == ("model.own", False, False)


@pytest.mark.parametrize(
    ("was", "now", "shown"),
    [
        (0.1234567, 0.1234568, ("0.1234567", "0.1234568")),
        (16, "16", ("16", "'16'")),
        (None, "not set", ("None", "'not set'")),
        ([0.1] * 40 + [0.2] + [0.1] * 40, [0.1] * 40 + [0.3] + [0.1] * 40, ("0.2", "0.3")),
        ("a" * 99 + "b" + "c" * 99, "a" * 99 + "d" + "c" * 99, ("ab", "ad")),
        (1, 2, ("1", "2")),
        ("a\nb", "a b", ("'a\\nb'", "'a b'")),
        ("\u200b", "\\u200b", ("'\\u200b'", "'\\\\u200b'")),
    ],
)
def test_difference_shows_distinct_texts_for_distinct_values(was, now, shown):
    (difference,) = differences({"key": was}, {"key": now})
    texts = str(difference).removeprefix("key: ").split(" -> ")
    assert texts[0] != texts[1]
    assert [part in text for part, text in zip(shown, texts, strict=True)] == [True, True]
    assert max(map(len, texts)) <= 61


VALUES = st.one_of(st.text(max_size=300), st.floats(), st.integers(), st.lists(st.floats(), max_size=40))


@given(VALUES, VALUES)
@settings(max_examples=examples(200))
def test_contrast_gives_distinct_texts_for_any_two_values(was, now):
    assume(one_line(repr(was)) != one_line(repr(now)))  # masked secrets are equal
    one, other = contrast(was, now)
    assert one != other
