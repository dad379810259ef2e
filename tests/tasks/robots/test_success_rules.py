import pytest
from support.composition import configure

from foundry.core.errors import ConfigError

POLICY = ["hparams=policy", "debug=fast"]
EVALUATOR = "evaluation.evaluators.success"


def lines(*overrides):
    with pytest.raises(ConfigError) as refused:
        configure(*POLICY, *overrides)
    return str(refused.value).splitlines()


def test_success_is_the_metric_of_policy_runs():
    settings = ["evaluation.early_stopping.patience=2", "checkpoint.keep_best.metric=val_success_low"]
    config = configure(*POLICY, *settings)
    assert (config.evaluation.metric, config.evaluation.direction.name) == ("val_success", "maximize")
    assert config.evaluation.early_stopping.metric == "val_success"
    assert config.evaluation.early_stopping.mode.name == "max"
    assert config.evaluation.evaluators["success"]["draw"] is True


def test_success_without_a_simulator_is_a_config_error():
    message = f"{EVALUATOR}: needs a simulator but simulator=none; choose one, or evaluation=default"
    assert message in lines("simulator=none")


def test_val_success_without_its_evaluator_is_refused():
    assert lines(f"{EVALUATOR}=null")[0].startswith(
        "evaluation.metric: is val_success but evaluations measure val_loss"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("episodes=0", "episodes: is 0 but must be at least 1"),
        ("episodes=2.5", "episodes: is 2.5 but must be a whole number"),
        ("at_a_time=true", "at_a_time: is True but must be a whole number"),
        ("first_episode=-1", "first_episode: is -1 but must be at least 0"),
        ("first_episode=4294967290", "first_episode: leads to episode 4294967339 but the last one is 4294967295"),
        ("instruction=another", "instruction: is another but must be one of own, other"),
        (
            "instruction=other",
            "instruction: is other but the policy reads no instructions; set data.instruction_tokens, or",
        ),
        ("instruction_tokens=4", "instruction_tokens: is 4 but must be data.instruction_tokens=null; set it to"),
        ("epsiodes=3", "epsiodes: is not an argument of foundry.evals.Success; did you mean episodes?"),
    ],
)
def test_success_settings_are_checked_by_compose(override, message):
    added = "+" if "epsiodes" in override else ""
    assert lines(f"{added}{EVALUATOR}.{override}")[0].startswith(f"{EVALUATOR}.{message}")
