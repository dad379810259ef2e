"""Objectives, datasets and `model=base` set default hyperparameters; explicit overrides take precedence."""

import numpy as np
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from support.composition import configure
from support.examples import long_case

from foundry.config.composition.compose import config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.composition.implied_options import DEFAULT_HPARAMS
from foundry.config.schemas.evaluation import Direction
from foundry.config.schemas.optimizer import SGD, AdamW, Muon
from foundry.config.schemas.root import to_config
from foundry.tasks.robots.data.lerobot_writing import Episode, write_lerobot

CHATS = ["objective=sft", "data=arithmetic"]
PAIRS = ["objective=dpo", "data=arithmetic", "data.form=preferences"]
REWARDS = ["objective=grpo", "data=arithmetic", "data.form=prompts", "environment=arithmetic"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config.json of a base model, and robot recordings in `recorded`."""
    made = tmp_path_factory.mktemp("own")
    sizes = '{"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 256}'
    (made / "config.json").write_text(sizes)
    frames = np.zeros((20, 40, 64, 3), np.uint8)
    episodes = [
        Episode(state=np.zeros((20, 3), np.float32), actions=np.zeros((20, 2), np.float32), task="pick", images=frames)
        for _ in range(2)
    ]
    write_lerobot(made / "recorded", episodes, fps=10, robot_type="arm")
    return made


@pytest.mark.parametrize(
    ("words", "batch", "rates", "epochs"),
    [
        long_case(CHATS, 16, (2e-5, 2e-4), 3),
        long_case(PAIRS, 32, (1e-6, 1e-5), 1),
        (REWARDS, 128, (1e-6, 1e-5), 1),
        long_case(["objective=distillation", "objective.teacher=BASE", "data=arithmetic"], 16, (1e-5, 1e-4), 3),
        (["model=base", "model.path=BASE"], 16, (2e-5, 2e-4), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_method_sets_optimizer_learning_rate_batch_size_and_epochs(words, batch, rates, epochs, folder):
    words = [word.replace("BASE", str(folder)) for word in words]
    for adapters, rate in zip(([], ["peft=lora"]), rates, strict=True):
        config = configure(*words, *adapters)
        hparams = config.hparams
        assert (hparams.global_batch_size, hparams.epochs, hparams.max_steps) == (batch, epochs, None)
        assert (hparams.lr, hparams.grad_clip_norm) == (pytest.approx(rate), 1.0)
        assert type(config.optimizer) is AdamW


def test_grpo_selects_by_validation_reward():
    evaluation = configure(*REWARDS).evaluation
    assert (evaluation.metric, evaluation.direction) == ("val_reward", Direction.maximize)
    assert evaluation.evaluators["held_out"] is None


def test_on_policy_distillation_sets_batch_size_to_the_rollout_size(folder):
    prompts = ["objective=distillation", f"objective.teacher={folder}", "data=arithmetic", "data.form=prompts"]
    for more, size in (([], 16), (["objective.num_prompts_per_step=6"], 6)):
        config = configure(*prompts, "objective.mode=on_policy", "evaluation=answers", *more)
        assert config.hparams.global_batch_size == config.objective.samples_per_rollout == size
        assert config.hparams.epochs == 1


def test_explicit_overrides_take_precedence_over_method_defaults():
    given = ["hparams.lr=3e-3", "hparams.global_batch_size=6", "optimizer=sgd", "scheduler.warmup=0"]
    config = configure(*CHATS, *given)
    assert (config.hparams.lr, config.hparams.global_batch_size, config.hparams.epochs) == (3e-3, 6, 3)
    assert (type(config.optimizer), config.scheduler.warmup) == (SGD, "0")
    config = configure("hparams=llm", *CHATS)
    assert (config.hparams.lr, config.hparams.max_steps, config.hparams.epochs) == (4e-3, 500, None)
    assert type(config.optimizer) is Muon


@pytest.mark.parametrize("budget", ["hparams.max_steps=700", "hparams.train_samples=700"])
def test_explicit_budget_replaces_the_default_epochs(budget):
    assert configure(*CHATS, budget).hparams.epochs is None
    assert configure(*CHATS, budget, "hparams.epochs=2").hparams.epochs == 2
    assert configure(*CHATS, "debug=fast").hparams.max_steps == 5


def test_text_training_uses_the_default_hyperparameters():
    assert {"hparams": DEFAULT_HPARAMS} in OmegaConf.load(f"{config_dir()}/config.yaml").defaults
    assert configure() == configure(f"hparams={DEFAULT_HPARAMS}")
    assert type(configure().optimizer) is Muon


@pytest.mark.parametrize(
    "words",
    [["data=lerobot"], ["hparams=policy", "data=lerobot"], ["objective=flow_policy", "data=lerobot"]],
    ids=" ".join,
)
def test_lerobot_data_requires_only_a_path(words, folder):
    config = configure(*words, f"data.path={folder / 'recorded'}")
    assert config.simulator._target_ is None
    assert (config.evaluation.metric, set(config.evaluation.evaluators)) == ("val_loss", {"held_out"})
    assert (config.hparams.lr, config.hparams.max_steps, config.hparams.loss_function) == (1e-3, 1600, "mse")
    assert (config.data.state_dim, config.data.action_dim) == (3, 2)


def test_chosen_simulator_makes_success_the_metric_of_recordings(folder):
    own = ["hparams=policy", "data=lerobot", f"data.path={folder / 'recorded'}"]
    config = configure(*own, "simulator=around", "data.state_dim=3")
    assert config.evaluation.metric == "val_success"
    assert configure(*own, "evaluation=default").simulator._target_ is None


def test_image_size_defaults_to_the_shorter_side_of_non_square_images(folder):
    own = ["data=lerobot", f"data.path={folder / 'recorded'}", "data.image_key=observation.images.front"]
    assert configure(*own).data.image_size == 40
    assert configure(*own, "data.image_size=16").model.image_size == 16


@pytest.mark.parametrize("words", [["data=demonstrations"], ["objective=diffusion_policy"], ["hparams=policy"]])
def test_policy_training_defaults_to_demonstrations_and_their_simulator(words):
    config = configure(*words)
    assert (config.data.episodes, config.simulator.task) == (300, "around")
    assert config.evaluation.metric == "val_success"


def test_diffusion_objective_sets_model_data_and_learning_rate():
    config = configure("objective=diffusion")
    assert (config.hparams.lr, type(config.model).__name__, type(config.data).__name__) == (4e-3, "DiT", "Digits")


@pytest.mark.parametrize(
    ("yaml", "rate"),
    [
        ("defaults: [/schema/objective/SFT@_here_]\n", 2e-5),
        ("defaults: [sft, _self_]\nsample_tokens: 8\n", 2e-5),
        ("_target_: foundry.SFT\n", 4e-3),
    ],
    ids=["by its schema", "by the option it extends", "of one's own"],
)
def test_custom_objective_gets_the_method_defaults_of_its_schema(yaml, rate, tmp_path):
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective" / "mine.yaml").write_text(yaml)
    found = compose_with_folder(tmp_path, "objective=mine", "data=arithmetic")
    assert found.hparams.lr == pytest.approx(rate)


@pytest.mark.parametrize(("chosen", "rate"), [("", 2e-5), (", override /hparams: llm", 4e-3)])
def test_experiment_can_override_the_hparams_of_its_objective(chosen, rate, tmp_path):
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndefaults: [override /objective: sft, override /data: arithmetic{chosen}]\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert compose_with_folder(tmp_path, "experiment=mine").hparams.lr == pytest.approx(rate)


def compose_with_folder(folder, *overrides):
    """Compose with a folder of user options on the search path."""
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        return to_config(hydra_compose("config", [f"hydra.searchpath=[{folder}]", *overrides]))
