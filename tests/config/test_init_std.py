"""Valid and invalid values of `model.init_std`."""

import math

import pytest

from foundry.config.init_std import parse_std
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError

HF = ("model=hf_gpt2",)


@pytest.mark.parametrize(
    ("word", "value"), [("wang", "wang"), ("small", "small"), ("0.006", 0.006), ("4.8e-3", 0.0048), ("1", 1)]
)
def test_init_std_accepts_a_number_or_a_rule(compose, word, value):
    model = to_config(compose(f"model.init_std={word}", f"model.embedding_init_std={word}")).model
    assert (model.init_std, model.embedding_init_std) == (value, value)
    assert to_config(compose(*HF, f"model.init_std={word}")).model.init_std == value


def test_init_std_defaults_of_native_and_hf_models(compose):
    native, hf = to_config(compose()).model, to_config(compose(*HF)).model
    assert (native.init_std, native.embedding_init_std) == (0.02, None)
    assert (hf.init_std, hf.embedding_init_std) == (None, None)


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["model.init_std=wnag"], "model.init_std", "is wnag but must be a number above 0, or small or wang; did you"),
        (["model.init_std=wnag"], "model.init_std", "did you mean wang?"),
        (["model.init_std=-1"], "model.init_std", "is -1 but must be a number above 0"),
        (["model.init_std=0"], "model.init_std", "is 0 but must be"),
        (["model.init_std=0.0"], "model.init_std", "is 0.0 but must be"),
        (["model.init_std=nan"], "model.init_std", "is nan but must be"),
        (["model.init_std=inf"], "model.init_std", "is inf but must be"),
        (["model.init_std=true"], "model.init_std", "is true but must be a number or a string"),
        (["model.init_std=null"], "model.init_std", "cannot be null"),
        (["model.embedding_init_std=smal"], "model.embedding_init_std", "did you mean small?"),
        ([*HF, "model.init_std=wnag"], "model.init_std", "did you mean wang?"),
        ([*HF, "model.init_std=true"], "model.init_std", "is true but must be a number or a string"),
        ([*HF, "model.embedding_init_std=0.1"], "model.embedding_init_std", "model.init_std is null"),
        ([*HF, "model.path=conf", "model.init_std=0.1"], "model.init_std", "is 0.1 but the weights come from"),
        ([*HF, "model.path=conf", "model.embedding_init_std=1"], "model.embedding_init_std", "model.path=conf"),
        (
            [*HF, "model.init_std=small", "+model.config.initializer_range=0.1"],
            "model.config.initializer_range",
            "is 0.1 but model.init_std=small; remove one",
        ),
    ],
    ids=str,
)
def test_invalid_init_std_gives_a_one_line_error(compose, overrides, key, text):
    with pytest.raises(ConfigError) as refused:
        compose(*overrides)
    (violation,) = refused.value.violations
    assert violation.key == key
    assert text in violation.message
    assert "\n" not in violation.message


def test_init_std_rules_are_functions_of_the_hidden_size():
    small, wang = parse_std("small"), parse_std("wang")
    assert callable(small)
    assert callable(wang)
    for hidden_size in (1, 768, 4096, 14336):
        assert small(hidden_size) == math.sqrt(2 / (5 * hidden_size))
        assert wang(hidden_size) == math.sqrt(1 / (3 * hidden_size))
    assert parse_std("0.0048") == 0.0048
