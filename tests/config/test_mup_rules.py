"""Settings of the parametrization: refusals, sizes at another width, and the hash of the configuration."""

import pytest
from support.composition import compose, configure

from foundry.config.record.frozen import hash_config
from foundry.config.schemas.model import DiT, Transformer
from foundry.core.errors import ConfigError

MUP = "model.parametrization=mup"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["model.base_width=64"],
            "model.base_width: is 64 but has no effect without model.parametrization=mup",
        ),
        (
            [MUP, "optimizer=sgd"],
            "model.parametrization: is mup but optimizer SGD has no rules for it; set it to standard, or choose "
            "optimizer=adamw or optimizer=muon",
        ),
        (
            [MUP, "optimizer=adam"],
            "optimizer.weight_decay: is 0.01 but the decay of Adam has no rule for model.parametrization=mup; set it "
            "to 0, or choose optimizer=adamw",
        ),
        (
            [MUP, "optimizer=adam", "optimizer.weight_decay=0", "scheduler.start_weight_decay=0.1"],
            "scheduler.start_weight_decay: is 0.1 but the decay of Adam has no rule for model.parametrization=mup; set "
            "it to 0, or choose optimizer=adamw",
        ),
        (
            ["model=vlm", "data=scenes", MUP],
            "model.parametrization: is mup but PrefixVLM has no rules for it; set it to standard, or choose "
            "model=transformer or model=dit",
        ),
    ],
)
def test_settings_without_a_rule_are_refused_in_a_line(overrides, line):
    with pytest.raises(ConfigError) as error:
        compose(*overrides)
    assert line in str(error.value).splitlines()


def test_mup_needs_no_other_setting_with_adamw_muon_and_adam_without_decay():
    for options in (["optimizer=adamw"], ["optimizer=muon"], ["optimizer=adam", "optimizer.weight_decay=0"]):
        assert configure(MUP, *options).model.width_ratio == 1.0


def test_default_settings_do_not_change_the_hash_and_mup_does():
    standard = hash_config(configure())
    assert hash_config(configure("model.parametrization=standard", "model.base_width=256")) == standard
    assert hash_config(configure(MUP)) != standard


def test_sizes_at_another_width_keep_the_head_size_and_the_ratios():
    settings = Transformer(vocab_size=10, max_seq_len=8, num_kv_heads=2)
    wide = settings.at_width(1024)
    sizes = wide.hidden_size, wide.intermediate_size, wide.num_heads, wide.num_kv_heads
    assert sizes == (1024, 2816, 16, 8)
    assert wide.at_width(256) == settings
    with pytest.raises(ValueError, match=r"^model\.num_kv_heads=2 at model\.hidden_size=256 is no whole number"):
        settings.at_width(64)
    with pytest.raises(ValueError, match="choose multiples of 128"):
        settings.at_width(192 + 1)
    assert DiT(image_size=8, num_channels=1, num_classes=2).at_width(64).num_heads == 2
