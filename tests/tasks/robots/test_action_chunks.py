"""Policies by diffusion, flow matching and regression: losses and actions match their formulas for any microbatches."""

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn

from foundry.config.schemas.objective import BetaSchedule, Prediction
from foundry.core.keyed_random import keyed_integers, keyed_normal, keyed_uniform
from foundry.tasks.robots.action_chunks import ActionRegression, DiffusionPolicy, FlowPolicy
from foundry.tasks.robots.models.policy_dit import PolicyDiT
from foundry.tasks.robots.protocols import ActingObjective
from foundry.tasks.robots.schemas import objective as schemas

HORIZON, ACTION_DIM, STATE_DIM = 8, 3, 5
CHUNK = {"horizon": HORIZON, "action_dim": ACTION_DIM, "action_steps": 4}
OBJECTIVES = {
    "sample": lambda: DiffusionPolicy(seed=5, prediction=Prediction.sample, **CHUNK),
    "epsilon": lambda: DiffusionPolicy(seed=5, prediction=Prediction.epsilon, **CHUNK),
    "v_prediction": lambda: DiffusionPolicy(seed=5, prediction=Prediction.v_prediction, **CHUNK),
    "flow": lambda: FlowPolicy(seed=5, **CHUNK),
    "l1": lambda: ActionRegression(**CHUNK),
    "mse": lambda: ActionRegression(loss_function="mse", **CHUNK),
}
each_objective = pytest.mark.parametrize("objective", [make() for make in OBJECTIVES.values()], ids=OBJECTIVES)


def model(image_size=None) -> PolicyDiT:
    torch.manual_seed(0)
    sizes = {"state_dim": STATE_DIM, "action_dim": ACTION_DIM, "num_observations": 2, "horizon": HORIZON}
    policy = PolicyDiT(**sizes, image_size=image_size, patch_size=2, hidden_size=32, num_layers=2, num_heads=2)
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.1)
    return policy


def microbatch(count: int = 16, first: int = 0, image_size=None):
    """Return samples without padding up to the ninth; later samples have 1, 2, ... padded actions."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "actions": torch.rand(16, HORIZON, ACTION_DIM, generator=generator) * 2 - 1,
        "state": torch.randn(16, 2, STATE_DIM, generator=generator),
        "is_padded": torch.arange(HORIZON) >= HORIZON - (torch.arange(16) - 8).clamp(min=0)[:, None],
        "position": torch.arange(16) + 100,
    }
    if image_size is not None:
        shape = (16, 2, 3, image_size, image_size)
        batch["images"] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return {name: value[first : first + count].clone() for name, value in batch.items()}


class Recorder(nn.Module):
    """Predicts 0.5 everywhere and records its inputs."""

    def forward(self, actions, times, state, images=None):
        self.actions, self.times, self.state, self.images = actions, times, state, images
        return torch.full_like(actions, 0.5)


def cosine_alpha_bar(*, zero_snr: bool):
    """Return the cosine schedule of Nichol and Dhariwal (2021) over 100 timesteps, (100,) float64."""
    angle = (torch.arange(101, dtype=torch.float64) / 100 + 0.008) / 1.008 * torch.pi / 2
    alpha_bar = torch.cumprod((angle.cos()[1:] ** 2 / angle.cos()[:-1] ** 2).clamp(min=0.001), 0)
    if zero_snr:  # Zero signal at the last timestep (Lin et al., 2024, algorithm 1).
        root = alpha_bar.sqrt()
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return alpha_bar


@pytest.mark.parametrize("prediction", list(Prediction))
def test_diffusion_policy_loss_matches_its_formula(prediction):
    batch, recorder = microbatch(), Recorder()
    loss = OBJECTIVES[prediction.value]().loss(recorder, batch).loss

    noise = keyed_normal(5, batch["position"], (HORIZON, ACTION_DIM), stream="noise").double()
    timesteps = keyed_integers(5, batch["position"], 100, stream="timestep")
    alpha_bar = cosine_alpha_bar(zero_snr=prediction is Prediction.v_prediction)[timesteps].reshape(-1, 1, 1)
    actions, signal, sigma = batch["actions"].double(), alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    target = {"epsilon": noise, "v_prediction": signal * noise - sigma * actions, "sample": actions}[prediction.value]
    squares = (0.5 - target).square().mean(2)

    torch.testing.assert_close(recorder.actions.double(), signal * actions + sigma * noise, rtol=0, atol=2e-5)
    assert torch.equal(recorder.times, timesteps.float())
    assert torch.equal(recorder.state, batch["state"])
    torch.testing.assert_close(loss.double(), squares[~batch["is_padded"]].sum(), rtol=1e-5, atol=0)
    assert loss.dtype == torch.float32


def test_flow_matching_loss_matches_its_formula():
    batch, recorder = microbatch(), Recorder()
    loss = OBJECTIVES["flow"]().loss(recorder, batch).loss
    noise = keyed_normal(5, batch["position"], (HORIZON, ACTION_DIM), stream="noise").double()
    times, actions = keyed_uniform(5, batch["position"], stream="timestep").double(), batch["actions"].double()
    along = times[:, None, None]
    torch.testing.assert_close(recorder.actions.double(), (1 - along) * noise + along * actions, rtol=0, atol=1e-6)
    torch.testing.assert_close(recorder.times.double(), 100 * times, rtol=0, atol=1e-5)
    squares = (0.5 - (actions - noise)).square().mean(2)
    torch.testing.assert_close(loss.double(), squares[~batch["is_padded"]].sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "power"), [("l1", 1), ("mse", 2)])
def test_action_regression_loss_matches_its_formula(name, power):
    batch, recorder = microbatch(), Recorder()
    loss = OBJECTIVES[name]().loss(recorder, batch).loss
    assert not recorder.actions.any()
    assert not recorder.times.any()
    errors = (0.5 - batch["actions"].double()).abs().pow(power).mean(2)
    torch.testing.assert_close(loss.double(), errors[~batch["is_padded"]].sum(), rtol=1e-6, atol=0)


@each_objective
def test_num_valid_counts_actions_without_padding(objective):
    batch = microbatch()
    assert objective.num_valid(batch) == 16 * HORIZON - sum(range(8))
    batch["position"][[0, 15]] = -1
    assert objective.num_valid(batch) == 14 * HORIZON - sum(range(7))


@each_objective
@pytest.mark.parametrize("size", [1, 4, 5])
def test_policy_loss_and_gradients_add_up_over_microbatches(objective, size):
    whole, cut = model(), model()
    total = objective.loss(whole, microbatch()).loss
    total.backward()
    parts = []
    for first in range(0, 16, size):
        part = objective.loss(cut, microbatch(min(size, 16 - first), first)).loss
        part.backward()
        parts.append(part.detach())
    torch.testing.assert_close(sum(parts), total.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(cut.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


@each_objective
def test_padding_samples_are_ignored_by_policy_losses(objective):
    padded, plain = model(), model()
    batch = {name: torch.cat([value, value[:3]]) for name, value in microbatch(4).items()}
    batch["position"][4:], batch["actions"][4:], batch["state"][4:] = -1, torch.nan, torch.nan
    assert objective.num_valid(batch) == objective.num_valid(microbatch(4))
    loss, expected = objective.loss(padded, batch).loss, objective.loss(plain, microbatch(4)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(padded.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)


@each_objective
def test_padded_nan_actions_do_not_affect_gradients(objective):
    batch, policy = microbatch(), model()
    batch["actions"][batch["is_padded"]] = torch.nan
    loss = objective.loss(policy, batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


@each_objective
def test_nan_in_a_valid_action_gives_a_nan_loss(objective):
    batch = microbatch()
    batch["actions"][0, 0, 0] = torch.nan
    assert objective.loss(model(), batch).loss.isnan()


@each_objective
def test_microbatch_of_padding_has_zero_policy_loss_and_gradients(objective):
    policy, batch = model(), microbatch(3)
    batch["position"].fill_(-1)
    loss = objective.loss(policy, batch).loss
    loss.backward()
    assert (objective.num_valid(batch), loss.item()) == (0, 0.0)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in policy.parameters())


@each_objective
def test_images_are_passed_to_the_policy_if_present(objective):
    recorder, batch = Recorder(), microbatch(image_size=16)
    objective.loss(recorder, batch)
    assert torch.equal(recorder.images, batch["images"])
    objective.act(recorder, {"state": batch["state"], "images": batch["images"]}, torch.arange(16))
    assert torch.equal(recorder.images, batch["images"])


def observation(count: int):
    return {"state": microbatch(count)["state"]}


@each_objective
def test_actions_of_a_row_depend_on_its_observation_and_key_only(objective):
    assert isinstance(objective, ActingObjective)
    assert objective.action_steps == CHUNK["action_steps"]
    policy, keys = model().eval(), torch.tensor([7, 3, 2**40, 3])
    seen = observation(4)
    seen["state"][3] = seen["state"][1]
    answers = objective.act(policy, seen, keys)
    assert (answers.shape, answers.dtype) == ((4, HORIZON, ACTION_DIM), torch.float32)
    assert not answers.requires_grad
    assert answers.abs().max() <= 1
    torch.testing.assert_close(answers[3], answers[1], rtol=0, atol=1e-6)
    order = torch.tensor([2, 0])
    again = objective.act(policy, {"state": seen["state"][order]}, keys[order])
    torch.testing.assert_close(again, answers[order], rtol=1e-5, atol=1e-6)
    other = objective.act(policy, seen, keys + 1)
    assert torch.equal(other, answers) == isinstance(objective, ActionRegression)


@each_objective
def test_act_encodes_the_observation_once(objective):
    policy, batch, keys = model(image_size=16).eval(), microbatch(4, image_size=16), torch.arange(4)
    seen, looked = {name: batch[name] for name in ("state", "images")}, []
    policy.picture_encoder.register_forward_hook(lambda *_: looked.append(1))
    once = objective.act(policy, seen, keys)
    assert looked == [1]
    again = objective.act(ObservesAnew(policy), seen, keys)
    assert torch.equal(again, once)
    assert len(looked) == 1 + (1 if isinstance(objective, ActionRegression) else 10)


class ObservesAnew(nn.Module):
    """A policy that encodes the observation in every forward pass."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, *given):
        return self.policy(*given)


def test_action_regression_acts_with_its_clamped_prediction():
    policy, seen = model().eval(), observation(4)
    expected = policy(torch.zeros(4, HORIZON, ACTION_DIM), torch.zeros(4), seen["state"]).clamp(-1, 1)
    assert torch.equal(OBJECTIVES["l1"]().act(policy, seen, torch.arange(4)), expected)


@torch.no_grad()
def test_flow_policy_acts_by_euler_integration():
    policy, seen, keys = model().double().eval(), {"state": observation(4)["state"].double()}, torch.arange(4)
    x = keyed_normal(5, keys, (HORIZON, ACTION_DIM), stream="act").double()
    for step in range(10):
        x = x + policy(x, torch.full((4,), 10.0 * step), seen["state"]).double() / 10
    torch.testing.assert_close(
        OBJECTIVES["flow"]().act(model().eval(), observation(4), keys), x.clamp(-1, 1).float(), rtol=0, atol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize("prediction", list(Prediction))
def test_diffusion_policy_acts_by_ddim(prediction):
    """Song et al. (2021), equation 12 without noise, clean actions clipped; velocity starts at timestep 99."""
    alpha_bar = cosine_alpha_bar(zero_snr=prediction is Prediction.v_prediction)
    policy, state, keys = model().double().eval(), observation(4)["state"].double(), torch.arange(4)
    x = keyed_normal(5, keys, (HORIZON, ACTION_DIM), stream="act").double()
    for timestep in range(99 if prediction is Prediction.v_prediction else 90, -1, -10):
        signal, sigma = alpha_bar[timestep].sqrt(), (1 - alpha_bar[timestep]).sqrt()
        answer = policy(x, torch.full((4,), float(timestep)), state).double()
        if prediction is Prediction.epsilon:
            clean = (x - sigma * answer) / signal
        else:
            clean = answer if prediction is Prediction.sample else signal * x - sigma * answer
        clean = clean.clamp(-1, 1)
        noise = (x - signal * clean) / sigma
        after = alpha_bar[timestep - 10] if timestep >= 10 else torch.ones(())
        x = after.sqrt() * clean + (1 - after).sqrt() * noise
    actions = OBJECTIVES[prediction.value]().act(model().eval(), observation(4), keys)
    # Noise prediction divides by the signal, 0.14 at the first timestep, which amplifies rounding errors.
    torch.testing.assert_close(actions.double(), x, rtol=0, atol=2e-3 if prediction is Prediction.epsilon else 1e-4)


@pytest.mark.parametrize("steps", [2, 5])
def test_act_takes_the_configured_number_of_sampling_steps(steps):
    asked, policy = [], model().eval()
    policy.register_forward_pre_hook(lambda _, given: asked.append(given[1][0].item()))
    FlowPolicy(seed=5, sampling_steps=steps, **CHUNK).act(policy, observation(4), torch.arange(4))
    assert asked == [100 * step / steps for step in range(steps)]
    asked.clear()
    of_timesteps = {"num_train_timesteps": 40, "prediction": Prediction.sample}
    DiffusionPolicy(seed=5, sampling_steps=steps, **of_timesteps, **CHUNK).act(policy, observation(4), torch.arange(4))
    assert asked == [40 // steps * step for step in reversed(range(steps))]


@pytest.mark.parametrize("beta_schedule", list(BetaSchedule))
def test_policy_noise_follows_the_beta_schedule_and_timesteps(beta_schedule):
    batch, recorder = microbatch(), Recorder()
    objective = DiffusionPolicy(seed=5, num_train_timesteps=40, beta_schedule=beta_schedule, **CHUNK)
    objective.loss(recorder, batch)
    timesteps = keyed_integers(5, batch["position"], 40, stream="timestep")
    assert torch.equal(recorder.times, timesteps.float())
    alpha_bar = DDPMScheduler(40, beta_schedule=beta_schedule.value).alphas_cumprod[timesteps].reshape(-1, 1, 1)
    noise = keyed_normal(5, batch["position"], (HORIZON, ACTION_DIM), stream="noise")
    expected = alpha_bar.sqrt() * batch["actions"] + (1 - alpha_bar).sqrt() * noise
    torch.testing.assert_close(recorder.actions, expected)


@pytest.mark.parametrize(
    ("schema", "changes", "expected"),
    [
        (
            "ActionRegression",
            {"action_steps": 17},
            "objective.action_steps: is 17 but must be at most data.horizon=16, the actions of a chunk",
        ),
        (
            "DiffusionPolicy",
            {"sampling_steps": 101},
            "objective.sampling_steps: is 101 but must be at most objective.num_train_timesteps=100",
        ),
        ("FlowPolicy", {"sampling_steps": 101, "action_steps": 16}, None),
    ],
)
def test_too_many_action_or_sampling_steps_are_refused(schema, changes, expected):
    violations = [str(violation) for violation in getattr(schemas, schema)(horizon=16, action_dim=2, **changes).check()]
    assert violations == ([] if expected is None else [expected])
