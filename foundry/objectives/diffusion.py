"""Denoising diffusion objective: a model predicts the noise, the velocity or the clean image from a noisy image."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.config.schemas.objective import BetaSchedule, Prediction
from foundry.config.schemas.objective import Diffusion as DiffusionSettings
from foundry.core.errors import ConfigError, Violation
from foundry.core.keyed_random import keyed_integers, keyed_normal, keyed_uniform
from foundry.core.protocols import LossSum, Microbatch, Objective
from foundry.generation.image_samples import ImageSamples

_MAX_CLASSES = 16
"""Maximum number of classes of the images that are generated if no labels are given."""


class Diffusion(Objective):
    """Mean squared error of predicted noise (Ho et al., 2020), velocity (Salimans and Ho, 2022) or clean image.

    A microbatch holds `images`: (batch, channels, height, width) float32 in [-1, 1], `labels`: (batch,) int64 and
    `position`. The model maps (noisy images, timesteps, labels) to a prediction of the images' shape; the label
    `num_classes` stands for "no class". Without labels, `generate` selects at most 16 of the classes.
    """

    metrics: tuple[str, ...] = from_settings()

    @configured_by(DiffusionSettings)
    def __init__(self, settings: DiffusionSettings) -> None:
        self.settings = settings
        self.noise_schedule = make_noise_schedule(
            settings.prediction, settings.num_train_timesteps, settings.beta_schedule
        )

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of samples that are not padding."""
        return int((microbatch["position"] >= 0).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the sum over samples of the mean squared error over an image's elements, in float32.

        Noise, timesteps and dropped labels depend only on the seed and the sample's position. In evaluation mode no
        labels are dropped.
        """
        images, position = microbatch["images"].float(), microbatch["position"].cpu()
        is_valid = (position >= 0).to(images.device, non_blocking=True)
        # Padding may hold any values, including NaN, which must not reach a gradient.
        images = torch.where(is_valid[:, None, None, None], images, 0.0)
        noise, timesteps = self._noise(position, images)
        labels = self._labels(microbatch["labels"], position, drop=model.training)
        labels = torch.where(is_valid, labels, self.settings.num_classes)
        prediction = model(self.noise_schedule.add_noise(images, noise, timesteps), timesteps, labels)
        errors = F.mse_loss(prediction.float(), self._target(images, noise, timesteps), reduction="none")
        return LossSum(torch.where(is_valid, errors.flatten(1).mean(1), 0.0).sum())

    @torch.no_grad()
    def generate(
        self,
        model: nn.Module,
        data: Any,
        device: torch.device | str,
        *,
        samples_per_class: int | None = None,
        labels: Sequence[int] | None = None,
        guidance_scale: float | None = None,
        steps: int | None = None,
        seed: int | None = None,
    ) -> ImageSamples:
        """Generate images with DDIM (Song et al., 2021) and classifier-free guidance (Ho and Salimans, 2022).

        All ranks that hold a shard of the model must call it together; all return the same images.

        Args:
            model: called as in training, in evaluation mode.
            data: the data splits; the first training image defines the shape, and `class_names` labels the result.
            device: device of the model.
            samples_per_class: images per class; None uses the objective's setting.
            labels: class of each image; None generates `samples_per_class` images for each of at most 16 classes.
            guidance_scale: guidance scale; None uses the objective's setting.
            steps: denoising steps; None uses the objective's setting.
            seed: seed of the initial noise; None uses the objective's setting.

        Raises:
            ConfigError: no class is selected, a class does not exist, or there are more steps than timesteps.
        """
        settings = self.settings
        count = settings.samples_per_class if samples_per_class is None else samples_per_class
        steps = settings.sampling_steps if steps is None else steps
        class_range = range(0, settings.num_classes, -(-settings.num_classes // _MAX_CLASSES))
        classes = [label for label in class_range for _ in range(count)] if labels is None else list(labels)
        self._check_drawing(classes, steps)
        label_tensor = torch.tensor(classes, dtype=torch.int64)
        shape = tuple(data.train[0]["images"].shape)
        start = settings.seed if seed is None else seed
        images = keyed_normal(start, torch.arange(len(label_tensor)), shape, stream="draw", device=device)
        scale = settings.guidance_scale if guidance_scale is None else guidance_scale
        was_training = model.training
        model.eval()
        try:
            images = self._denoise(model, images, label_tensor.to(device), scale, steps)
        finally:
            model.train(was_training)
        return ImageSamples(images=images.clamp(-1, 1).cpu(), labels=label_tensor, names=tuple(data.class_names))

    def _check_drawing(self, classes: list[int], steps: int) -> None:
        num_timesteps = len(self.noise_schedule.alphas_cumprod)
        if not 1 <= steps <= num_timesteps:
            raise ConfigError(Violation("steps", f"is {steps} but must be from 1 to the {num_timesteps} timesteps"))
        if not classes:
            raise ConfigError(Violation("labels", "is empty; name at least one class"))
        num_classes = self.settings.num_classes
        if invalid := sorted({label for label in classes if not 0 <= label < num_classes}):
            raise ConfigError(Violation("labels", f"has {invalid} but classes are 0 to {num_classes - 1}"))

    def _denoise(self, model: nn.Module, images: Tensor, labels: Tensor, scale: float, steps: int) -> Tensor:
        sampler = DDIMScheduler.from_config(self.noise_schedule.config)
        sampler.set_timesteps(steps, device=images.device)
        for timestep in sampler.timesteps:
            prediction = self._guide(model, images, timestep.expand(len(images)), labels, scale)
            images = sampler.step(prediction, timestep, images, use_clipped_model_output=True).prev_sample
        return images

    def _guide(self, model: nn.Module, images: Tensor, timesteps: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Return the prediction with classifier-free guidance, computed in a single forward pass."""
        if scale == 1:
            return cast(Tensor, model(images, timesteps, labels)).float()
        no_class = torch.full_like(labels, self.settings.num_classes)
        both: Tensor = model(images.repeat(2, 1, 1, 1), timesteps.repeat(2), torch.cat((labels, no_class)))
        conditional, unconditional = both.float().chunk(2)
        return unconditional + scale * (conditional - unconditional)

    def _noise(self, position: Tensor, images: Tensor) -> tuple[Tensor, torch.IntTensor]:
        """Return the noise, shaped like `images`, and timesteps, (batch,) int64, of samples at these positions."""
        device, num_timesteps = images.device, len(self.noise_schedule.alphas_cumprod)
        seed = self.settings.seed
        noise = keyed_normal(seed, position, tuple(images.shape[1:]), stream="noise", device=device)
        timesteps = keyed_integers(seed, position, num_timesteps, stream="timestep", device=device)
        return noise, cast(torch.IntTensor, timesteps)  # diffusers' annotation, regardless of the dtype

    def _labels(self, labels: Tensor, position: Tensor, *, drop: bool) -> Tensor:
        settings = self.settings
        if not drop or settings.condition_dropout == 0:
            return labels
        chance = keyed_uniform(settings.seed, position, stream="condition", device=labels.device)
        return torch.where(chance < settings.condition_dropout, settings.num_classes, labels)

    def _target(self, images: Tensor, noise: Tensor, timesteps: torch.IntTensor) -> Tensor:
        return prediction_target(self.noise_schedule, images, noise, timesteps)


def prediction_target(schedule: DDIMScheduler, clean: Tensor, noise: Tensor, timesteps: torch.IntTensor) -> Tensor:
    """Return the target of the prediction: noise, velocity or the clean values; it has the shape of `clean`."""
    config: Any = schedule.config
    match Prediction(config.prediction_type):
        case Prediction.epsilon:
            return noise
        case Prediction.sample:
            return clean
        case Prediction.v_prediction:
            return schedule.get_velocity(clean, noise, timesteps)


def make_noise_schedule(
    prediction: Prediction, num_train_timesteps: int, beta_schedule: BetaSchedule, timestep_spacing: str = "trailing"
) -> DDIMScheduler:
    """Return the noise schedule for training and generation; `timestep_spacing` is an option of diffusers.

    With trailing spacing, generation starts at the noisiest timestep. For velocity prediction this timestep is pure
    noise, like the initial noise of generation (Lin et al., 2024, arXiv:2305.08891). Noise prediction cannot recover an
    image from pure noise, and sample prediction does not need pure noise.
    """
    schedule: DDIMScheduler = DDIMScheduler(
        num_train_timesteps=num_train_timesteps,
        beta_schedule=beta_schedule.value,
        prediction_type=prediction.value,
        timestep_spacing=timestep_spacing,
        rescale_betas_zero_snr=prediction is Prediction.v_prediction,
        clip_sample=True,
    )
    return schedule
