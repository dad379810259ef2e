"""Random mixtures of choices, values, deletions and broken syntax give a valid config or one-line errors."""

from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from test_hostile_values import VALUES, badly_said, nonsense

from foundry.config.composition.compose import config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.composition.store import GROUPS
from foundry.config.diagnostics.names import settings as known_settings
from foundry.core.errors import ConfigError

CHOICES = {
    "hparams": ["llm", "diffusion", "policy"],
    "optimizer": ["adamw", "muon", "sgd", "adam"],
    "scheduler": ["wsd", "cosine", "constant", "linear", "inverse_square_root"],
    "model": ["transformer", "dit", "hf_gpt2", "policy_dit"],
    "data": ["stdlib", "digits", "demonstrations"],
    "objective": ["next_token", "diffusion", "flow_policy"],
    "simulator": ["none", "around"],
    "distributed": ["ddp", "fsdp", "none"],
    "debug": ["fast", "null"],
    "experiment": ["digits_epsilon", "null"],
}
KEYS = sorted({key for key, _ in known_settings()})
BROKEN = [
    "",
    "=",
    "~",
    "+",
    "a",
    "a=",
    "=b",
    "a==b",
    "a=b=c",
    "'",
    '"',
    "{",
    "[",
    "a={",
    "a=[1",
    "a.b.=1",
    "@=1",
    "a@b:c=1",
]

choices = st.sampled_from([f"{group}={name}" for group, names in CHOICES.items() for name in names])
wrong_choices = st.builds("{}={}".format, st.sampled_from(GROUPS), st.sampled_from(VALUES))
good = st.builds(
    "{}={}".format, st.sampled_from(KEYS), st.sampled_from(["1", "2", "0.5", "true", "null", "auto", "0.1"])
)
bad = st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(VALUES))
signed = st.builds("{}{}".format, st.sampled_from(["+", "++", "~"]), st.one_of(good, choices))
deleted = st.builds("~{}".format, st.sampled_from([*KEYS, *GROUPS, "hydra", "debug", "hydra.run"]))
hydra = st.builds(
    "hydra{}={}".format,
    st.sampled_from(["", ".run.dir", ".job.num", "/launcher", "/sweeper", ".sweeper", ".job_logging", ".searchpath"]),
    st.sampled_from(["null", "x", "3", "[1]", "{a: 1}", "foundry", "local", "slurm", "${nope}"]),
)
packaged = st.builds("{}@{}={}".format, st.sampled_from(GROUPS), st.sampled_from(["a", "_global_", ""]), st.just("x"))
overrides = st.lists(
    st.one_of(choices, wrong_choices, good, bad, signed, deleted, hydra, packaged, st.sampled_from(BROKEN)),
    min_size=1,
    max_size=4,
)


def problems(given_words):
    try:
        config = compose("config", given_words, return_hydra_config=True)
    except ConfigError as refused:
        yield from badly_said(refused.violations)
    else:
        yield from nonsense(config)


@settings(derandomize=True, max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(overrides)
def test_random_override_mixtures_give_valid_configs_or_one_line_errors(given_words):
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        assert list(problems(given_words)) == []
