"""Denoising diffusion: the loss equals its formula for any split of the batch; sampling is deterministic."""

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn

from foundry.config.schemas import objective as schemas
from foundry.config.schemas.objective import BetaSchedule, Prediction
from foundry.core.errors import ConfigError
from foundry.core.keyed_random import keyed_integers, keyed_normal, keyed_uniform
from foundry.data.images.digits import LabelledImages
from foundry.data.splits import DataSplits
from foundry.models.dit import DiT
from foundry.objectives.diffusion import Diffusion


def objective(**changes) -> Diffusion:
    return Diffusion(**{"seed": 5, "num_classes": 10, "sampling_steps": 4, **changes})


def model() -> DiT:
    torch.manual_seed(0)
    dit = DiT(image_size=8, num_channels=1, num_classes=10, hidden_size=32, num_layers=2, num_heads=2)
    for parameter in dit.parameters():
        nn.init.normal_(parameter, std=0.1)
    return dit


def microbatch(count: int = 16, first: int = 0):
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(16, 1, 8, 8, generator=generator) * 2 - 1, torch.arange(16) % 10
    rows = slice(first, first + count)
    return {"images": images[rows], "labels": labels[rows], "position": torch.arange(16)[rows] + 100}


class Recorder(nn.Module):
    """A model that predicts ones and records its inputs."""

    def forward(self, images, timesteps, labels):
        self.images, self.timesteps, self.labels = images, timesteps, labels
        return torch.ones_like(images)


@pytest.mark.parametrize("prediction", list(Prediction))
def test_diffusion_loss_matches_its_formula(prediction):
    batch, recorder = microbatch(), Recorder()
    found = objective(prediction=prediction).loss(recorder, batch).loss

    angle = (torch.arange(1001, dtype=torch.float64) / 1000 + 0.008) / 1.008 * torch.pi / 2
    alpha_bar = torch.cumprod((angle.cos()[1:] ** 2 / angle.cos()[:-1] ** 2).clamp(min=0.001), 0)
    if prediction is Prediction.v_prediction:  # Zero signal at the last timestep (Lin et al., 2024, algorithm 1).
        root = alpha_bar.sqrt()
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    noise = keyed_normal(5, batch["position"], (1, 8, 8), stream="noise").double()
    timesteps = keyed_integers(5, batch["position"], 1000, stream="timestep")
    signal = alpha_bar[timesteps].sqrt().reshape(-1, 1, 1, 1)
    sigma = (1 - alpha_bar[timesteps]).sqrt().reshape(-1, 1, 1, 1)
    images = batch["images"].double()
    target = {"epsilon": noise, "v_prediction": signal * noise - sigma * images, "sample": images}[prediction.value]

    torch.testing.assert_close(recorder.images.double(), signal * images + sigma * noise, rtol=0, atol=2e-5)
    assert torch.equal(recorder.timesteps, timesteps)
    expected = (1 - target).square().mean(dim=(1, 2, 3)).sum()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 4, 5])
def test_diffusion_loss_and_gradients_add_up_over_microbatches(size):
    diffusion, whole, cut = objective(condition_dropout=0.5), model(), model()
    total = diffusion.loss(whole, microbatch()).loss
    total.backward()
    parts = []
    for first in range(0, 16, size):
        part = diffusion.loss(cut, microbatch(min(size, 16 - first), first)).loss
        part.backward()
        parts.append(part.detach())
    torch.testing.assert_close(sum(parts), total.detach(), rtol=1e-6, atol=1e-6)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(cut.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)


def test_padding_is_ignored_by_the_diffusion_loss():
    diffusion, padded, plain = objective(), model(), model()
    batch = {key: torch.cat([value, value[:3]]) for key, value in microbatch(4).items()}
    batch["position"][4:], batch["images"][4:], batch["labels"][4:] = -1, torch.nan, -100
    assert diffusion.num_valid(batch) == 4
    found, expected = diffusion.loss(padded, batch).loss, diffusion.loss(plain, microbatch(4)).loss
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(padded.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)


def test_microbatch_of_padding_has_zero_diffusion_loss_and_gradients():
    diffusion, dit, batch = objective(), model(), microbatch(3)
    batch["position"].fill_(-1)
    loss = diffusion.loss(dit, batch).loss
    loss.backward()
    assert (diffusion.num_valid(batch), loss.item()) == (0, 0.0)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in dit.parameters())


def test_conditions_are_dropped_in_training_only():
    diffusion, recorder, batch = objective(condition_dropout=0.5), Recorder(), microbatch()
    dropped = keyed_uniform(5, batch["position"], stream="condition") < 0.5
    assert 0 < dropped.sum() < 16
    diffusion.loss(recorder.train(), batch)
    assert torch.equal(recorder.labels == 10, dropped)
    assert torch.equal(recorder.labels[~dropped], batch["labels"][~dropped])
    diffusion.loss(recorder.eval(), batch)
    assert torch.equal(recorder.labels, batch["labels"])


def test_condition_dropout_has_the_given_rate():
    chance = keyed_uniform(5, torch.arange(20_000), stream="condition")
    assert abs((chance < 0.1).float().mean() - 0.1) < 0.008


def splits() -> DataSplits:
    images = LabelledImages(microbatch()["images"], microbatch()["labels"])
    return DataSplits(train=images, validation=images, fingerprint="")


def test_diffusion_sampling_is_deterministic_and_keeps_the_model_unchanged():
    diffusion, dit = objective(samples_per_class=2), model().train()
    first = diffusion.generate(dit, splits(), "cpu")
    torch.randn(3)
    second = diffusion.generate(dit, splits(), "cpu")
    assert torch.equal(first.images, second.images)
    assert first.labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert (first.images.shape, first.images.dtype) == ((20, 1, 8, 8), torch.float32)
    assert first.images.abs().max() <= 1
    assert dit.training
    assert all(parameter.grad is None for parameter in dit.parameters())
    assert not torch.equal(first.images, diffusion.generate(dit, splits(), "cpu", seed=6).images)


def test_diffusion_samples_the_given_labels_and_counts():
    diffusion, dit = objective(), model()
    asked = diffusion.generate(dit, splits(), "cpu", labels=[7, 7, 1])
    assert asked.labels.tolist() == [7, 7, 1]
    assert len(diffusion.generate(dit, splits(), "cpu", samples_per_class=1).images) == 10


class Perfect(nn.Module):
    """A model that knows the images: class k has brightness k / 10, and label 10 ("no class") has brightness 0."""

    def __init__(self, diffusion: Diffusion) -> None:
        super().__init__()
        self.diffusion, self.batch_sizes = diffusion, []

    def forward(self, images, timesteps, labels):
        self.batch_sizes.append(len(images))
        brightness = torch.where(labels == 10, 0, labels) / 10
        clean = brightness.reshape(-1, 1, 1, 1).expand_as(images)
        alpha_bar = self.diffusion.noise_schedule.alphas_cumprod[timesteps].reshape(-1, 1, 1, 1)
        noise = (images - alpha_bar.sqrt() * clean) / (1 - alpha_bar).sqrt()
        velocity = alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * clean
        return {"epsilon": noise, "v_prediction": velocity, "sample": clean}[self.diffusion.settings.prediction.value]


@pytest.mark.parametrize("prediction", list(Prediction))
@pytest.mark.parametrize(("scale", "expected", "forward_size"), [(1.0, 0.4, 3), (2.0, 0.8, 6), (4.0, 1.0, 6)])
@pytest.mark.parametrize("is_own", [False, True])
def test_guidance_scales_the_sample_of_a_perfect_model(prediction, scale, expected, forward_size, is_own):
    own, asked = ({"guidance_scale": scale}, {}) if is_own else ({}, {"guidance_scale": scale})
    diffusion = objective(prediction=prediction, sampling_steps=20, **own)
    perfect = Perfect(diffusion)
    drawn = diffusion.generate(perfect, splits(), "cpu", labels=[4, 4, 4], **asked)
    assert set(perfect.batch_sizes) == {forward_size}
    assert len(perfect.batch_sizes) == 20
    torch.testing.assert_close(drawn.images, torch.full((3, 1, 8, 8), expected), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"labels": [3, 10, -1]}, r"labels: has \[-1, 10\] but classes are 0 to 9"),
        ({"labels": []}, "labels: is empty"),
        ({"samples_per_class": 0}, "labels: is empty"),
        ({"steps": 1001}, "steps: is 1001 but must be from 1 to the 1000 timesteps"),
        ({"steps": 0}, "steps: is 0"),
    ],
)
def test_invalid_sampling_request_is_a_config_error(asked, message):
    with pytest.raises(ConfigError, match=message):
        objective().generate(model(), splits(), "cpu", **asked)


def test_more_sampling_steps_than_timesteps_are_refused():
    found = [str(violation) for violation in schemas.Diffusion(sampling_steps=50, num_train_timesteps=20).check()]
    assert found == ["objective.sampling_steps: is 50 but must be at most objective.num_train_timesteps=20"]


@pytest.mark.parametrize("beta_schedule", list(BetaSchedule))
def test_every_noise_schedule_generates_finite_samples(beta_schedule):
    drawn = objective(beta_schedule=beta_schedule).generate(model(), splits(), "cpu", labels=[1])
    assert drawn.images.isfinite().all()


@pytest.mark.parametrize("num_train_timesteps", [50, 1000])
@pytest.mark.parametrize("beta_schedule", list(BetaSchedule))
def test_noise_follows_the_beta_schedule_and_number_of_timesteps(beta_schedule, num_train_timesteps):
    settings = {"beta_schedule": beta_schedule, "num_train_timesteps": num_train_timesteps}
    batch, recorder = microbatch(), Recorder()
    objective(prediction=Prediction.epsilon, **settings).loss(recorder, batch)
    timesteps = keyed_integers(5, batch["position"], num_train_timesteps, stream="timestep")
    assert torch.equal(recorder.timesteps, timesteps)
    alpha_bar = DDPMScheduler(num_train_timesteps, beta_schedule=beta_schedule.value).alphas_cumprod[timesteps]
    signal, sigma = (root.sqrt().reshape(-1, 1, 1, 1) for root in (alpha_bar, 1 - alpha_bar))
    noise = keyed_normal(5, batch["position"], (1, 8, 8), stream="noise")
    torch.testing.assert_close(recorder.images, signal * batch["images"] + sigma * noise)
