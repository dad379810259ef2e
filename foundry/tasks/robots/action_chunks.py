"""Objectives of policies that predict a chunk of actions by diffusion, flow matching or regression."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.config.schemas.objective import Prediction
from foundry.core.keyed_random import keyed_integers, keyed_normal, keyed_uniform
from foundry.core.protocols import LossSum, Microbatch, Objective
from foundry.objectives.diffusion import make_noise_schedule, prediction_target
from foundry.tasks.robots.schemas import objective as schemas

_FLOW_TIMES = 100.0
"""Time at the end of a flow path as passed to the model, whose embedding of timesteps hardly separates 0 and 1."""


class ActionChunks(Objective):
    """Base class of the policy objectives: error of the actions, summed over all actions except padding.

    A microbatch contains `actions`: (batch, horizon, action_dim) float32 in [-1, 1], `is_padded`: (batch, horizon)
    bool, true after the end of an episode, `state`: (batch, num_observations, state_dim) float32, and `position`. With
    images it also contains `images`: (batch, num_observations, 3, height, width) uint8, and with instructions
    `instruction`: (batch, instruction_tokens) int64, with -1 after the last token.

    The model maps (actions, times, state, images if present) and the keyword argument `instruction`, if present, to a
    prediction of the shape of the actions. If the model has a method `observe`, diffusion and flow policies call it
    once for each chunk that they sample.
    """

    metrics: tuple[str, ...] = from_settings()
    action_steps: int = from_settings()

    @configured_by(schemas.ActionChunks)
    def __init__(self, settings: schemas.ActionChunks) -> None:
        self.settings, self.chunk = settings, (settings.horizon, settings.action_dim)

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of actions that are not padding, in samples that are not padding."""
        return int((~microbatch["is_padded"] & (microbatch["position"] >= 0)[:, None]).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the error averaged over the dimensions of an action and summed over actions, in float32.

        Random numbers depend only on the seed and the sample's position.
        """
        actions, state = microbatch["actions"].float(), microbatch["state"].float()
        is_sample = (microbatch["position"] >= 0).to(actions.device, non_blocking=True)[:, None]
        is_valid = is_sample & ~microbatch["is_padded"]
        # Padding samples may contain NaN, which must not reach a gradient. Finite actions after an episode's end stay
        # inputs of the model.
        actions = torch.where(is_valid[..., None] | actions.isfinite(), actions, 0.0)
        state = torch.where(is_sample[..., None], state, 0.0)
        errors = self._errors(model, actions, {**microbatch, "state": state})
        return LossSum(torch.where(is_valid, errors.mean(-1), 0.0).sum())

    @torch.no_grad()
    def act(self, model: nn.Module, observation: Microbatch, keys: Tensor) -> Tensor:
        """Return the next actions, (batch, horizon, action_dim) float32 in [-1, 1].

        Args:
            model: the model in evaluation mode; each row is computed independently.
            observation: `state`, and `images` and `instruction` if the data has them, as in a microbatch.
            keys: (batch,) int64 in host memory; a row's random numbers depend on the seed and the row's key.
        """
        return self._draw(model, observation, keys).clamp(-1, 1)

    @abstractmethod
    def _errors(self, model: nn.Module, actions: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the errors (batch, horizon, action_dim) float32 of the model on a microbatch."""

    @abstractmethod
    def _draw(self, model: nn.Module, observation: Mapping[str, Any], keys: Tensor) -> Tensor:
        """Return sampled actions (batch, horizon, action_dim) float32."""


class DiffusionPolicy(ActionChunks):
    """Diffusion policy: mean squared error of actions, their noise or their velocity.

    Chi et al., 2023, arXiv:2303.04137. Actions are sampled by DDIM (Song et al., 2021).
    """

    settings: schemas.DiffusionPolicy

    @configured_by(schemas.DiffusionPolicy)
    def __init__(self, settings: schemas.DiffusionPolicy) -> None:
        super().__init__(settings)
        # With leading timesteps, as in Chi et al., sampling begins below the highest noise level, and policies succeed
        # more often. Velocity prediction is trained for sampling that begins with pure noise (trailing timesteps).
        spacing = "trailing" if settings.prediction is Prediction.v_prediction else "leading"
        self.noise_schedule = make_noise_schedule(
            settings.prediction, settings.num_train_timesteps, settings.beta_schedule, spacing
        )
        self.noise_schedule.set_timesteps(settings.sampling_steps)

    def _errors(self, model: nn.Module, actions: Tensor, microbatch: Microbatch) -> Tensor:
        position, device = microbatch["position"].cpu(), actions.device
        num_timesteps = len(self.noise_schedule.alphas_cumprod)
        noise = keyed_normal(self.settings.seed, position, self.chunk, stream="noise", device=device)
        integers = keyed_integers(self.settings.seed, position, num_timesteps, stream="timestep", device=device)
        timesteps = cast(torch.IntTensor, integers)  # diffusers annotates IntTensor for every integer dtype
        noisy = self.noise_schedule.add_noise(actions, noise, timesteps)
        target = prediction_target(self.noise_schedule, actions, noise, timesteps)
        return (_ask(model, noisy, timesteps.float(), microbatch) - target).square()

    def _draw(self, model: nn.Module, observation: Mapping[str, Any], keys: Tensor) -> Tensor:
        actions = keyed_normal(self.settings.seed, keys, self.chunk, stream="act", device=observation["state"].device)
        observation = _observed(model, observation)
        for timestep in self.noise_schedule.timesteps.tolist():
            times = torch.full((len(keys),), float(timestep), device=actions.device)
            answer = _ask(model, actions, times, observation)
            step: Any = self.noise_schedule.step(answer, timestep, actions, use_clipped_model_output=True)
            actions = step.prev_sample
        return actions


class FlowPolicy(ActionChunks):
    """Flow matching policy: mean squared error of the velocity along straight paths from noise to actions.

    Flow matching (Lipman et al., 2023, arXiv:2210.02747), applied to actions as in pi0 (Black et al., 2024).
    """

    settings: schemas.FlowPolicy

    @configured_by(schemas.FlowPolicy)
    def __init__(self, settings: schemas.FlowPolicy) -> None:
        super().__init__(settings)

    def _errors(self, model: nn.Module, actions: Tensor, microbatch: Microbatch) -> Tensor:
        position, device = microbatch["position"].cpu(), actions.device
        noise = keyed_normal(self.settings.seed, position, self.chunk, stream="noise", device=device)
        times = keyed_uniform(self.settings.seed, position, stream="timestep", device=device)
        t = times[:, None, None]
        velocity = _ask(model, (1 - t) * noise + t * actions, times * _FLOW_TIMES, microbatch)
        return (velocity - (actions - noise)).square()

    def _draw(self, model: nn.Module, observation: Mapping[str, Any], keys: Tensor) -> Tensor:
        actions = keyed_normal(self.settings.seed, keys, self.chunk, stream="act", device=observation["state"].device)
        observation = _observed(model, observation)
        steps = self.settings.sampling_steps
        for step in range(steps):
            times = torch.full((len(keys),), step / steps * _FLOW_TIMES, device=actions.device)
            actions = actions + _ask(model, actions, times, observation) / steps
        return actions


class ActionRegression(ActionChunks):
    """Regression of actions by absolute error, as in ACT (Zhao et al., 2023, arXiv:2304.13705), or squared error.

    The model receives zeros as actions, at time zero.
    """

    settings: schemas.ActionRegression

    @configured_by(schemas.ActionRegression)
    def __init__(self, settings: schemas.ActionRegression) -> None:
        super().__init__(settings)

    def _errors(self, model: nn.Module, actions: Tensor, microbatch: Microbatch) -> Tensor:
        differences = self._draw(model, microbatch, microbatch["position"]) - actions
        return differences.square() if self.settings.loss_function == "mse" else differences.abs()

    def _draw(self, model: nn.Module, observation: Mapping[str, Any], keys: Tensor) -> Tensor:
        state = observation["state"]
        zeros = torch.zeros((len(state), *self.chunk), device=state.device)
        return _ask(model, zeros, zeros[:, 0, 0], observation)


def _ask(model: nn.Module, actions: Tensor, times: Tensor, observation: Mapping[str, Any]) -> Tensor:
    """Return the model's prediction, (batch, horizon, action_dim) float32."""
    images = (observation["images"],) if "images" in observation else ()
    keywords = {name: observation[name] for name in ("instruction", "observed") if name in observation}
    return cast(Tensor, model(actions, times, observation["state"], *images, **keywords)).float()


def _observed(model: nn.Module, observation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the observation; if the model has a method `observe`, its output is added as `observed`."""
    observe: Callable[..., Any] | None = getattr(model, "observe", None)
    if observe is None:
        return observation
    inputs = {name: observation[name] for name in ("state", "images", "instruction") if name in observation}
    return {**observation, "observed": observe(**inputs)}
