"""Model sizes that contradict the data are rejected at composition time."""

import pytest
from support.composition import configure

from foundry.core.errors import ConfigError

LLAMA = "model=hf_llama"
DIGITS = "hparams=diffusion"


@pytest.mark.parametrize(
    ("overrides", "key", "named"),
    [
        ([DIGITS, "model.image_size=16"], "model.image_size", "must be data.image_size=8"),
        ([DIGITS, "model.image_size=4"], "model.image_size", "must be data.image_size=8"),
        ([DIGITS, "model.num_channels=3"], "model.num_channels", "must be data.num_channels=1"),
        ([DIGITS, "model.num_classes=9"], "model.num_classes", "at least data.num_classes=10"),
        ([DIGITS, "model.patch_size=3"], "model.patch_size", "must divide"),
        (["model.vocab_size=4095"], "model.vocab_size", "at least data.vocab_size=4096"),
        (["model.max_seq_len=255"], "model.max_seq_len", "at least data.seq_len=256"),
        ([LLAMA, "model.vocab_size=100"], "model.vocab_size", "at least data.vocab_size=4096"),
        ([LLAMA, "model.max_seq_len=100"], "model.max_seq_len", "at least data.seq_len=256"),
    ],
)
def test_model_sizes_that_contradict_the_data_give_a_one_line_error(overrides, key, named):
    with pytest.raises(ConfigError) as refused:
        configure(*overrides)
    (violation,) = refused.value.violations
    assert violation.key == key
    assert named in violation.message


@pytest.mark.parametrize(
    "overrides",
    [[DIGITS, "model.num_classes=11"], ["model.vocab_size=5000"], ["model.max_seq_len=1024"], ["data.vocab_size=300"]],
)
def test_model_sizes_above_those_of_the_data_are_accepted(overrides):
    config = configure(*overrides)
    key, _, value = overrides[-1].partition("=")
    group, _, name = key.partition(".")
    assert getattr(getattr(config, group), name) == int(value)
