"""Diffusion transformer: shapes, initialization, gradients and precision."""

import pytest
import torch
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.dit import DiT, position_table, sinusoids
from foundry.models.fsdp_block import find_blocks


def small_dit(**changes) -> DiT:
    torch.manual_seed(0)
    sizes = {"image_size": 8, "num_channels": 3, "num_classes": 10, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    return DiT(**{**sizes, **changes})


def trained_looking(model: DiT) -> DiT:
    """Replace all weights by random ones, since some are initialized to zero; return the model."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def inputs(batch: int = 5):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, 8, 8, generator=generator)
    return images, torch.arange(batch) * 100, torch.arange(batch) % 11


@pytest.mark.parametrize("patch_size", [1, 2, 4, 8])
def test_dit_output_is_float32_and_has_the_shape_of_the_images(patch_size):
    images, timesteps, labels = inputs()
    output = small_dit(patch_size=patch_size)(images, timesteps, labels)
    assert output.shape == images.shape
    assert output.dtype == torch.float32


def test_mlp_ratio_is_the_feed_forward_width_over_the_hidden_size():
    assert [tuple(block.mlp.fc1.weight.shape) for block in small_dit(mlp_ratio=1.5).blocks] == [(48, 32)] * 2


def test_dit_output_is_zero_at_initialization():
    assert torch.equal(small_dit()(*inputs()), torch.zeros(5, 3, 8, 8))


def test_dit_blocks_are_identities_at_initialization():
    model = small_dit()
    x, condition = torch.randn(2, 16, 32), torch.randn(2, 32)
    assert all(torch.equal(block(x, condition), x) for block in model.blocks)


def test_every_dit_parameter_gets_a_nonzero_gradient():
    model = trained_looking(small_dit())
    model(*inputs()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_every_dit_parameter_is_used_at_initialization():
    model = small_dit()
    model(*inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_find_blocks_returns_the_dit_blocks():
    model = small_dit()
    assert list(find_blocks(model)) == list(model.blocks)


def test_patchify_and_unpatchify_are_inverse():
    model, images = small_dit(), inputs()[0]
    patches = model._to_patches(images)
    assert patches.shape == (5, 16, 12)
    assert torch.equal(patches[0, 1].reshape(3, 2, 2), images[0, :, 0:2, 2:4])
    assert torch.equal(model._to_images(patches), images)


def test_dit_output_depends_on_timestep_class_and_position():
    model, (images, timesteps, labels) = trained_looking(small_dit()), inputs()
    output = model(images, timesteps, labels)
    assert not torch.allclose(output, model(images, timesteps + 50, labels))
    assert not torch.allclose(output, model(images, timesteps, labels.flip(0)))
    shifted = model(images.roll(2, dims=3), timesteps, labels).roll(-2, dims=3)
    assert not torch.allclose(output, shifted, atol=1e-4)


def test_autocast_over_fp32_weights_agrees_with_bf16_weights():
    model, (images, timesteps, labels) = trained_looking(small_dit()), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(images, timesteps, labels)
    bf16 = model.bfloat16()(images, timesteps, labels)
    assert autocast.dtype == bf16.dtype == torch.float32
    torch.testing.assert_close(autocast, bf16, rtol=0, atol=1e-6)


def test_dit_residual_stream_is_bf16_under_autocast():
    model, seen = small_dit(), []
    model.blocks[1].register_forward_hook(lambda block, args, output: seen.extend([args[0].dtype, output.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_dit_init_weights_is_reproducible_after_the_meta_device():
    with torch.device("meta"):
        model = small_dit()
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    other = small_dit()
    torch.manual_seed(3)
    other.init_weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_dit_flops_agree_with_the_flop_counter_of_torch():
    from torch.utils.flop_counter import FlopCounterMode

    model, (images, timesteps, labels) = trained_looking(small_dit()), inputs(4)
    with FlopCounterMode(display=False) as counter:
        model(images, timesteps, labels).sum().backward()
    # The gradients with respect to the images and the timestep features are never computed.
    unneeded = 2 * (16 * 12 * 32 + 256 * 32)
    attention = 6 * 2 * 2 * 16**2 * 32
    counted = counter.get_total_flops() / 4
    assert model.flops_per_sample() - unneeded - attention <= counted <= model.flops_per_sample() * 1.05


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"patch_size": 3}, "model.patch_size"),
        ({"hidden_size": 34}, "model.hidden_size"),
        ({"num_heads": 5}, "model.num_heads"),
    ],
)
def test_indivisible_dit_sizes_are_a_config_error(changes, key):
    with pytest.raises(ConfigError, match=key):
        small_dit(**changes)


def test_position_table_is_distinct_and_sinusoids_begin_with_cosines():
    table = position_table(4, 32, torch.device("cpu"))
    assert table.shape == (16, 32)
    assert torch.cdist(table, table).add(torch.eye(16) * 9).min() > 0.5
    assert torch.equal(sinusoids(torch.tensor([0]), 8), torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]]))
