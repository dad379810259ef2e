"""Diffusion transformer over actions: shapes, initialization, inputs and precision."""

import pytest
import torch
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.fsdp_block import find_blocks
from foundry.tasks.robots.models.policy_dit import PictureEncoder, PolicyDiT

SIZES = {"state_dim": 5, "action_dim": 3, "num_observations": 2, "horizon": 8, "image_size": None}
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "patch_size": 2}


def policy(**changes) -> PolicyDiT:
    torch.manual_seed(0)
    return PolicyDiT(**{**SIZES, **SMALL, **changes})


def trained_looking(model: PolicyDiT) -> PolicyDiT:
    """Replace all weights by random ones, since some are initialized to zero; return the model."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def inputs(batch: int = 4, image_size: int | None = None):
    generator = torch.Generator().manual_seed(1)
    actions, state = torch.randn(batch, 8, 3, generator=generator), torch.randn(batch, 2, 5, generator=generator)
    given = actions, torch.arange(batch) * 10.5, state
    if image_size is None:
        return given
    shape = (batch, 2, 3, image_size, image_size)
    return *given, torch.randint(256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("patch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("image_size", [None, 17, 32])
def test_policy_dit_output_has_the_shape_of_the_actions_in_float32(patch_size, image_size):
    model, given = policy(patch_size=patch_size, image_size=image_size), inputs(image_size=image_size)
    assert torch.equal(model(*given), torch.zeros(4, 8, 3))  # Gates and output are initialized to zero.
    answer = trained_looking(model)(*given)
    assert (answer.shape, answer.dtype) == ((4, 8, 3), torch.float32)
    assert answer.std() > 0


@pytest.mark.parametrize("image_size", [None, 16])
def test_every_policy_dit_parameter_gets_a_nonzero_gradient(image_size):
    model = trained_looking(policy(image_size=image_size))
    model(*inputs(image_size=image_size)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_mlp_ratio_is_the_feed_forward_width_over_the_hidden_size():
    assert [tuple(block.mlp.fc1.weight.shape) for block in policy(mlp_ratio=1.5).blocks] == [(48, 32)] * 2


def test_every_policy_dit_parameter_is_used_at_initialization():
    model = policy(image_size=16)
    model(*inputs(image_size=16)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_policy_dit_depends_on_time_and_every_observation_and_image():
    model, (actions, timesteps, state, images) = trained_looking(policy(image_size=16)), inputs(image_size=16)
    before = model(actions, timesteps, state, images)
    assert not torch.allclose(before, model(actions, timesteps + 0.5, state, images))
    for observation in range(2):
        other, others = state.clone(), images.clone()
        other[:, observation] += 1
        others[:, observation] = 255 - others[:, observation]
        assert not torch.allclose(before, model(actions, timesteps, other, images))
        assert not torch.allclose(before, model(actions, timesteps, state, others))


def test_policy_dit_rows_are_independent_and_action_order_matters():
    model, given = trained_looking(policy(image_size=16)), inputs(image_size=16)
    torch.testing.assert_close(model(*(part[1:2] for part in given)), model(*given)[1:2], rtol=1e-5, atol=1e-6)
    moved = model(given[0].roll(2, dims=1), *given[1:]).roll(-2, dims=1)
    assert not torch.allclose(moved, model(*given), atol=1e-4)


def test_policy_dit_token_covers_adjacent_actions():
    model = trained_looking(policy(patch_size=4, num_layers=0))
    actions, timesteps, state = inputs()
    changed = actions.clone()
    changed[:, 5] += 1
    differs = (model(changed, timesteps, state) != model(actions, timesteps, state)).any(dim=2)
    assert differs.any(dim=0).tolist() == [False] * 4 + [True] * 4


def test_keypoint_encoder_locates_a_bright_patch():
    encoder = PictureEncoder()
    for parameter in encoder.parameters():
        nn.init.constant_(parameter, 0.05)
    image = torch.full((1, 3, 32, 32), 127, dtype=torch.uint8)
    image[..., 24:28, 4:8] = 255  # Bottom left.
    rows, columns = encoder(image).unflatten(1, (2, -1))[0]
    assert (rows > 0.1).all()
    assert (columns < -0.1).all()
    mirrored_rows, mirrored_columns = encoder(image.flip(-1)).unflatten(1, (2, -1))[0]
    assert (mirrored_columns > 0.1).all()
    torch.testing.assert_close(mirrored_rows, rows, rtol=0.1, atol=0.1)


def test_autocast_over_fp32_weights_agrees_with_bf16_weights():
    model, given = trained_looking(policy()), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(*given)
    bf16 = model.bfloat16()(*given)
    assert autocast.dtype == bf16.dtype == torch.float32
    torch.testing.assert_close(autocast, bf16, rtol=0, atol=1e-6)


def test_policy_dit_blocks_have_a_bf16_residual_stream_under_autocast():
    model, seen = policy(image_size=16), []
    assert list(find_blocks(model)) == list(model.blocks)
    model.blocks[1].register_forward_hook(lambda block, args, output: seen.extend([args[0].dtype, output.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs(image_size=16))
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_policy_dit_init_weights_fills_a_model_from_the_meta_device():
    with torch.device("meta"):
        model = policy(image_size=16)
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    other = policy(image_size=16)
    other.init_weights(seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


@pytest.mark.parametrize("image_size", [None, 16])
def test_policy_dit_flops_agree_with_the_flop_counter_of_torch(image_size):
    from torch.utils.flop_counter import FlopCounterMode

    model, given = trained_looking(policy(image_size=image_size)), inputs(image_size=image_size)
    with FlopCounterMode(display=False) as counter:
        model(*given).sum().backward()
    counted = counter.get_total_flops() / 4
    # The gradient with respect to the inputs is never computed; at most half of attention is counted.
    of_inputs = 2 * (4 * 2 * 3 * 32 + 256 * 32 + (2 * 5 * 64 if image_size is None else 2 * 64 * 3 * 32 * 25))
    attention = 6 * 2 * 2 * 4**2 * 32
    assert model.flops_per_sample() - of_inputs - attention <= counted <= model.flops_per_sample() * 1.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"patch_size": 6},
            r"model\.patch_size: is 6 but must divide the actions of a chunk, data\.horizon=8; set it to 2",
        ),
        ({"hidden_size": 31, "num_heads": 1}, r"model\.hidden_size: is 31 but must be even"),
        ({"num_heads": 5}, r"model\.num_heads: is 5 but must divide"),
    ],
)
def test_indivisible_policy_dit_sizes_are_a_config_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        policy(**changes)
