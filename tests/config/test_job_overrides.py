import pytest

from foundry.config.composition.job_overrides import (
    brief,
    format_command,
    key_and_value,
    recorded_overrides,
    short_names,
)


@pytest.mark.parametrize(
    ("word", "pair"),
    [("a.b=1", ("a.b", "1")), ("++a=x=y", ("a", "x=y")), ("a=", ("a", ""))],
)
def test_key_and_value_splits_an_override(word, pair):
    assert key_and_value(word) == pair


def test_short_names_drop_the_group_if_unambiguous():
    assert short_names(["hparams.lr", "a.size", "b.size", "optimizer"]) == {
        "hparams.lr": "lr",
        "a.size": "a.size",
        "b.size": "b.size",
        "optimizer": "optimizer",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.0012345678901234", "0.001235"),
        ("1.2345678901e-05", "1.235e-05"),
        ("0.00025", "0.00025"),
        ("a_rather_long_word", "a_rather_long_word"),
        ("[0.9,0.95]", "[0.9,0.95]"),
    ],
)
def test_brief_rounds_numbers_with_many_digits(value, text):
    assert brief(value) == text


def test_format_command_keeps_config_flags_and_drops_sweep_flags():
    assert format_command(["a=1", "b='x y'"], ["-m", "a=1,2"]) == """python -m foundry a=1 'b='"'"'x y'"'"''"""
    assert format_command(["a=1"], []) == "python -m foundry a=1"
    for flag in (
        ["--config-dir", "own"],
        ["--config-dir=own"],
        ["-cd", "own"],
        ["--config-dir", "own", "--config-name", "mine"],
        ["-cp", "/own", "--config-name=mine"],
    ):
        assert format_command(["a=1"], ["-m", *flag, "a=1,2"]) == f"python -m foundry {' '.join(flag)} a=1"
    both = format_command(["a=1", "hparams_search=lr_range"], ["-m", "a=1,2", "hparams_search=lr_range"])
    assert both == "python -m foundry a=1 hparams_search=lr_range hydra.mode=RUN"
    assert format_command(["a=1"], ["hparams_search=lr_range"]) == "python -m foundry a=1 hydra.mode=RUN"


@pytest.mark.parametrize(
    ("text", "overrides"), [("- a=1\n- b=2\n", ("a=1", "b=2")), ("{", ()), ("a: 1", ()), (None, ())]
)
def test_recorded_overrides_are_read_from_hydra_overrides_yaml(tmp_path, text, overrides):
    (tmp_path / ".hydra").mkdir()
    if text is not None:
        (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
    assert recorded_overrides(tmp_path) == overrides
