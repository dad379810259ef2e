"""Rules between a policy and the rest of a run, which `compose` checks, with one error line for each violation."""

import pytest
from support.composition import configure

from foundry.core.errors import ConfigError

POLICY = "hparams=policy"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [POLICY, "model.patch_size=5"],
            "model.patch_size: is 5 but must divide the actions of a chunk, data.horizon=16; set it to 1",
        ),
        (
            [POLICY, "data.horizon=8", "objective.action_steps=9"],
            "objective.action_steps: is 9 but must be at most data.horizon=8, the actions of a chunk",
        ),
        (
            [POLICY, "model.horizon=8"],
            "model.horizon: is 8 but must be data.horizon=16; leave it out to follow the data",
        ),
        (
            [POLICY, "objective.action_dim=3"],
            "objective.action_dim: is 3 but must be data.action_dim=2; leave it out to follow the data",
        ),
        (
            [POLICY, "model.state_dim=3"],
            "model.state_dim: is 3 but must be data.state_dim=17; leave it out to follow the data",
        ),
        (
            [POLICY, "model.image_size=64"],
            "model.image_size: is 64 but data.image_size is null: there are no images; leave it out to follow the data",
        ),
        (
            [POLICY, "objective.sampling_steps=200"],
            "objective.sampling_steps: is 200 but must be at most objective.num_train_timesteps=100",
        ),
        (
            [POLICY, "objective=action_regression", "objective.loss_function=l2"],
            "objective.loss_function: is l2 but must be l1 or mse",
        ),
        (
            ["hparams=diffusion", "simulator=around", "evaluation=success"],
            "evaluation.evaluators.success: measures a policy, which objective Diffusion lacks; "
            "choose objective=diffusion_policy, or evaluation=default",
        ),
        (
            [POLICY, "distributed=fsdp", "distributed.tensor_parallel=2", "distributed.nproc_per_node=2"],
            "distributed.tensor_parallel: is 2 but model PolicyDiT does not support tensor parallelism; set it to 1, "
            "or choose model=transformer",
        ),
    ],
)
def test_contradictory_policy_settings_are_one_line_errors(overrides, expected):
    with pytest.raises(ConfigError) as refused:
        configure(*overrides)
    assert [str(violation) for violation in refused.value.violations] == [expected]


def test_policy_run_without_a_simulator_is_refused():
    with pytest.raises(ConfigError) as refused:
        configure(POLICY, "simulator=none")
    assert [str(violation) for violation in refused.value.violations] == [
        "simulator: none is incompatible with data=demonstrations, which needs a simulator with an expert; "
        "choose one, or data=lerobot",
        "evaluation.evaluators.success: needs a simulator but simulator=none; choose one, or evaluation=default",
    ]


@pytest.mark.parametrize(
    ("overrides", "loss_function"),
    [
        ([], "mse"),
        (["objective=flow_policy"], "mse"),
        (["objective=action_regression"], "l1"),
        (["objective=action_regression", "objective.loss_function=mse"], "mse"),
    ],
)
def test_loss_function_follows_the_policy_objective(overrides, loss_function):
    assert configure(POLICY, *overrides).hparams.loss_function == loss_function


def test_policy_model_sizes_follow_data_and_simulator():
    config = configure(POLICY, "simulator.image_size=64", "data.horizon=24", "data.num_observations=1")
    model = config.model
    assert (model.state_dim, model.action_dim, model.image_size) == (4, 2, 64)
    assert (model.horizon, model.num_observations) == (24, 1)
    assert (config.objective.horizon, config.objective.action_dim) == (24, 2)
    assert (config.evaluation.metric, config.checkpoint.keep_best.metric) == ("val_success", "val_success")
