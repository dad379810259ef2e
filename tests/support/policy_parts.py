"""A policy for `Reach` that requires no training, and demonstrations to train one."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from foundry.core.keyed_random import keyed_normal
from foundry.data.splits import DataSplits
from foundry.models.fsdp_block import FSDPBlock
from foundry.tasks.robots.data.episodes import Recording, episode_splits
from foundry.tasks.robots.names import STATISTICS
from foundry.tasks.robots.schemas.data import Episodes
from support.reach import Reach


class Units:
    """Statistics that keep states unchanged and scale actions by 0.1."""

    def normalise_state(self, state):
        return state

    def restore_actions(self, actions):
        return actions * 0.1


DATA = DataSplits(train=[], validation=[], fingerprint="", kept={STATISTICS: Units()})


REACH_POLICY = [
    f"hydra.searchpath=[{Path(__file__).parents[1] / 'e2e' / 'conf'}]",
    "hparams=diffusion",
    "debug=fast",
    "data=reach",
    "simulator=reach",
    "model=policy_dit",
    "model.patch_size=4",
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "objective=action_regression",
    "objective.action_steps=4",
    "hparams.loss_function=l1",
    "hparams.lr=3e-3",
    "hparams.ema_decay=0.9",
    "scheduler=constant",
    "scheduler.min_lr=0",
    "scheduler.warmup=0 steps",
    "hparams.global_batch_size=64",
    "hparams.per_gpu_batch_size=64",
    "evaluation=success",
    "evaluation.evaluators.success.episodes=10",
    "evaluation.evaluators.success.at_a_time=4",
]
"""Overrides of a small policy that solves most episodes after 60 steps."""


def demonstrations(*, seed, episodes, state_dim, action_dim, num_observations, horizon, image_size):
    """Record expert episodes with simulator seeds from 2**32 on, and return them as windows."""
    simulator, states, actions, lengths = Reach(state_dim=state_dim, action_dim=action_dim), [], [], []
    for number in range(episodes):
        states.append(simulator.reset(2**32 + number)["state"])
        for length in range(1, simulator.max_steps + 1):
            actions.append(simulator.expert_action().astype(np.float32))
            step = simulator.step(actions[-1])
            if step.success or step.ended:
                lengths.append(length)
                break
            states.append(step.observation["state"])
    recording = Recording(state=np.stack(states), actions=np.stack(actions), lengths=np.array(lengths))
    return windowed(recording, num_observations=num_observations, horizon=horizon, held_out=0.1)


def windowed(recording, **settings):
    """Split a recording into windows, by settings of `Episodes` that override defaults without a run."""
    alone = {"state_dim": 1, "action_dim": 1, "tokenizer": None, "vocab_size": 4096}
    return episode_splits(recording, Episodes(_target_="", **{**alone, **settings}))


class Block(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        nn.init.normal_(self.layer.weight, std=0.02)

    def forward(self, x):
        return x + 1e-3 * self.layer(x).tanh()


class GoThere(nn.Module):
    """Moves to the goal, with layers that wrappers can shard; maps (batch, 2, 4) states to (batch, 4, 2) actions."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.read = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.write = nn.Linear(32, 2)
        with torch.no_grad():
            self.read.weight[:2].zero_()
            self.read.bias[:2].zero_()
            for axis in (0, 1):  # read the newer of the two states
                self.read.weight[axis, 4 + axis], self.read.weight[axis, 6 + axis] = -10, 10
            self.write.weight.zero_()
            self.write.bias.zero_()
            self.write.weight[0, 0] = self.write.weight[1, 1] = 1

    def forward(self, state):
        x = self.read(state.flatten(1))
        for block in self.blocks:
            x = block(x)
        return (0.8 * self.write(x).clamp(-1, 1))[:, None].expand(-1, 4, -1)


class Wandering:
    """Actions of the model plus keyed noise; executes two of four actions."""

    action_steps = 2

    def __init__(self, seed=1, noise=1.5):
        self.seed, self.noise, self.calls = seed, noise, []

    def act(self, model, observation, keys):
        self.calls.append((tuple(observation["state"].shape), keys.tolist()))
        return model(observation["state"]) + self.noise * keyed_normal(self.seed, keys, (4, 2), stream="act")


class Blind(Reach):
    """A simulator that cannot render."""

    def render(self, size):
        raise RuntimeError("no EGL here")
