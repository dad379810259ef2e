import logging
import sys

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from support.composition import compose, configure, forget_configs

from foundry.config.composition.compose import install
from foundry.config.record.frozen import hash_config, load_config, plain, save_config
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir import redact
from foundry.run_dir.log import RunLog, Terminal
from foundry.run_dir.redact import MASK, masked_text, one_line, printable

CANARY = "canary-4f1d9c77"
OWN_MODEL = "model=with_key"


@pytest.fixture(autouse=True)
def own_model(monkeypatch):
    """A model option with secret settings, and environment variables that hold secrets."""
    install()
    monkeypatch.setattr(redact, "_secrets", {})
    forget_configs()  # composition registers the secrets
    node = {
        "_target_": "builtins.dict",
        "api_key": None,
        "header": None,
        "nested": {"auth": {"password": None}},
        "list": [],
    }
    ConfigStore.instance().store(group="model", name="with_key", node=node)
    monkeypatch.setenv("OWN_SECRET", CANARY)
    monkeypatch.setenv("DATABASE", f"postgresql://ann:{CANARY}@host/db")
    monkeypatch.setenv("SIZE", "77")


LITERAL = [
    ["tracking.uri=http://ann:{}@host:5000"],
    ["tracking.uri=https://{}@host"],
    ["tracking.uri='${{oc.env:NOWHERE,http://ann:{}@host}}'"],
    ["tracking.uri='http://ann:{}${{oc.env:OWN_SECRET}}@host'"],
    ["tracking.run_name='https://bucket/x?X-Amz-Signature={}&b=1'"],
    ["data.cache_dir='https://bucket/x?a=1&sig={}'"],
    ["tracking.experiment_name='token={}'"],
    [OWN_MODEL, "model.api_key={}"],
    [OWN_MODEL, "model.api_key='${{oc.env:NOWHERE,{}}}'"],
    [OWN_MODEL, "model.nested.auth.password={}"],
    [OWN_MODEL, "model.nested.auth={{password: {}}}"],
    [OWN_MODEL, "+model.credentials={{user: {}, more: [x]}}"],
    [OWN_MODEL, "model.list=[{{client_secret: {}}}]"],
    [OWN_MODEL, "+model.hf_token=[{}]"],
    ["+hydra.job.env_set.HF_TOKEN={}"],
]


@pytest.mark.parametrize("overrides", LITERAL, ids=str)
def test_literal_secret_is_rejected_and_masked(overrides):
    with pytest.raises(ConfigError) as refused:
        compose(*(word.format(CANARY) for word in overrides))
    assert CANARY not in str(refused.value)
    assert CANARY not in "".join(str(violation) for violation in refused.value.violations)
    assert "environment" in str(refused.value)


MISTYPED = [
    "tracking.ur=http://ann:{}@host",
    "trackin.uri=http://ann:{}@host",
    "+hparams.api_key={}",
    "hparams.password={}",
    "hparams.lr=http://ann:{}@host",
    "+model.api_key={} x=y",
    "+model.api_key=[{}",
    "--token={}",
    "optimizer=https://ann:{}@host",
]


@pytest.mark.parametrize("word", MISTYPED)
def test_errors_about_mistyped_secrets_mask_them(word):
    with pytest.raises(ConfigError) as refused:
        compose(word.format(CANARY))
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "recorded"),
    [
        (["model.api_key=${oc.env:OWN_SECRET}"], {"api_key": "${oc.env:OWN_SECRET}"}),
        (["model.header='Bearer ${oc.env:OWN_SECRET}'"], {"header": "Bearer ${oc.env:OWN_SECRET}"}),
        (["model.header=${oc.env:DATABASE}"], {"header": "${oc.env:DATABASE}"}),
        (
            ["model.header='http://ann:${oc.env:OWN_SECRET}@host/${oc.env:SIZE}'"],
            {"header": "http://ann:${oc.env:OWN_SECRET}@host/${oc.env:SIZE}"},
        ),
        (
            ["model.api_key=${oc.env:OWN_SECRET}", "model.header=${model.api_key}"],
            {"api_key": "${oc.env:OWN_SECRET}", "header": "${oc.env:OWN_SECRET}"},
        ),
        (
            ["model.nested.auth.password=${oc.env:OWN_SECRET}"],
            {"nested": {"auth": {"password": "${oc.env:OWN_SECRET}"}}},
        ),
        (["model.header=${oc.env:SIZE}"], {"header": "77"}),
    ],
    ids=str,
)
def test_saved_config_names_the_variable_of_an_environment_secret(overrides, recorded, tmp_path, monkeypatch):
    config = configure(OWN_MODEL, *overrides)
    assert str(config.model).count(CANARY) + str(config.model).count("77") > 0, "the run has the value"
    assert recorded.items() <= plain(config)["model"].items()
    text = save_config(config, tmp_path).read_text()
    assert CANARY not in text
    assert plain(load_config(tmp_path, trust=True)) == plain(config)
    before = hash_config(config)
    monkeypatch.setenv("OWN_SECRET", "renewed-4f1d9c77")
    monkeypatch.setenv("DATABASE", "postgresql://ann:renewed@host/db")
    assert hash_config(configure(OWN_MODEL, *overrides)) == before, "a renewed key is the same run"


@pytest.mark.parametrize(
    "word",
    [
        "tracking.run_name=secret_garden",
        "tracking.uri=sqlite:///mlflow.db",
        "tracking.uri=http://host:5000/path@v2",
        "+hydra.job.env_set.TOKENIZERS_PARALLELISM=false",
        "hparams.seed=5",
    ],
)
def test_settings_without_secrets_are_accepted(word):
    key, value = word.lstrip("+").split("=")
    config = compose(word)
    assert key.startswith("hydra.") or str(OmegaConf.select(config, key)) == value


def test_sweep_rejects_literal_secrets_at_composition(monkeypatch):
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.types import RunMode

    from foundry.config.composition.compose import config_dir

    loader = ConfigLoaderImpl(create_config_search_path(config_dir()))
    for overrides in ([OWN_MODEL, f"model.api_key={CANARY},other"], [f"tracking.uri=http://ann:{CANARY}@host"]):
        with pytest.raises(ConfigError, match="environment") as refused:
            loader.load_configuration("config", overrides, RunMode.MULTIRUN)
        assert CANARY not in str(refused.value)


def test_logs_and_errors_mask_environment_secrets(tmp_path, capsys):
    configure(OWN_MODEL, "model.api_key=${oc.env:OWN_SECRET}")
    assert CANARY not in str(Violation("model", f"says {CANARY}"))
    logger = logging.Logger("test")
    logger.addHandler(RunLog(tmp_path / "foundry.log"))
    logger.addHandler(Terminal(sys.stderr))
    try:
        raise ValueError(f"401 for {CANARY} \x1b[2Jand http://ann:hidden-pw@host")
    except ValueError:
        logger.exception("failed with %s", CANARY)
    message = (tmp_path / "foundry.log").read_text(), capsys.readouterr().err
    for text in message:
        assert "Traceback" in text
        assert CANARY not in text
        assert "hidden-pw" not in text
        assert "\x1b" not in text


def test_masked_text_masks_assignments_to_secret_keys():
    command = "python -m foundry +model.api_key=abc 'data.hf_token=xyz' hparams.lr=0.1 data.eos_token=<eos>"
    assert masked_text(command) == (
        f"python -m foundry +model.api_key={MASK} 'data.hf_token={MASK}' hparams.lr=0.1 data.eos_token=<eos>"
    )
    assert masked_text("model.api_key='${oc.env:KEY}'") == "model.api_key='${oc.env:KEY}'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07a", "a"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x08b\x07c\x7fd\x9be", "abcde"),
        ("\x1bPq\x1b\\x", "Pq\\x"),
        ("loss\u202edaer", "lossdaer"),
        ("one\ntwo\tthree", "one\ntwo\tthree"),
        ("日本 é ✓", "日本 é ✓"),
    ],
)
def test_printable_strips_terminal_control_sequences(text, shown):
    assert printable(text) == shown
    assert one_line(text) == " ".join(shown.split())


def test_short_secrets_are_masked_as_whole_words_only():
    redact.remember("rain")
    redact.remember("longer-secret")
    redact.remember("abc")  # too short to mask
    assert masked_text("training in rain, (rain) abc xlonger-secretx") == "training in ***, (***) abc x***x"
