"""Prefix vision-language model: attention pattern, cached keys and values, and initialization."""

import pytest
import torch
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.decoder.rotary import rotary_table, rotate
from foundry.models.fsdp_block import find_blocks
from foundry.models.token_loss import TokenLoss
from foundry.models.vlm import PrefixBlock, PrefixVLM
from foundry.parallel.checkpointing import checkpointed

SIZES = {"vocab_size": 61, "max_seq_len": 12, "image_size": 16, "hidden_size": 32, "intermediate_size": 48}
HEADS = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
PATCHES = 4
"""Number of patches of an image of 16 x 16 pixels."""


def vlm(**changes) -> PrefixVLM:
    torch.manual_seed(0)
    return PrefixVLM(**{**SIZES, **HEADS, "init_std": 0.2, **changes})


def inputs(batch: int = 3, seq_len: int = 7, num_images: int = 1):
    generator = torch.Generator().manual_seed(1)
    shape = (batch, num_images, 3, 16, 16)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return torch.randint(61, (batch, seq_len), generator=generator), images


def log_probs(model, tokens, images):
    return model(tokens, tokens.clamp(min=0), images=images).log_prob


@pytest.mark.parametrize("num_images", [1, 2])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_vlm_outputs_cover_text_positions_only(num_images, tie_embeddings):
    model, (tokens, images) = vlm(num_images=num_images, tie_embeddings=tie_embeddings), inputs(num_images=num_images)
    output = model(tokens, tokens, images=images, return_logits=True)
    assert output.log_prob.shape == (3, 7)
    assert output.logits.shape == (3, 7, 61)
    hidden, kept, is_visible = model.trunk(tokens, images)
    length = num_images * PATCHES + 7
    assert hidden.shape == (3, length, 32)
    assert [(key.shape, value.shape) for key, value in kept] == [((3, 2, length, 8), (3, 2, length, 8))] * 2
    assert is_visible.all()
    assert is_visible.shape == (3, length)
    made = model(tokens, tokens, images=images, token_loss=TokenLoss())
    torch.testing.assert_close(made.loss, -output.log_prob.sum())


def test_vlm_reports_image_size_and_max_seq_len():
    assert (vlm(image_size=24).image_size, vlm(max_seq_len=9).max_seq_len) == (24, 9)


def test_text_token_attends_to_all_images_and_earlier_text_only():
    model, (tokens, images) = vlm(num_images=2), inputs(num_images=2)
    before = log_probs(model, tokens, images)
    later = tokens.clone()
    later[:, 5] = (later[:, 5] + 1) % 61
    after = model(later, tokens, images=images).log_prob
    assert torch.equal(after[:, :5], before[:, :5])
    assert (after[:, 5:] != before[:, 5:]).all()
    for number in range(2):
        other = images.clone()
        other[:, number, :, 8:, 8:] = 255 - other[:, number, :, 8:, 8:]  # The last patch of the image.
        assert (log_probs(model, tokens, other) != before).all()


def test_images_attend_to_each_other_and_not_to_text():
    model, (tokens, images) = vlm(num_images=2), inputs(num_images=2)
    before = model.trunk(tokens, images)[0][:, : 2 * PATCHES]
    assert torch.equal(model.trunk((tokens + 1) % 61, images)[0][:, : 2 * PATCHES], before)
    other = images.clone()
    other[:, 1, :, 8:, 8:] = 255 - other[:, 1, :, 8:, 8:]
    assert (model.trunk(tokens, other)[0][:, 0] != before[:, 0]).any(dim=1).all()


def test_padding_does_not_change_vlm_outputs():
    model, (tokens, images) = vlm(), inputs()
    short = log_probs(model, tokens[:, :4], images)
    padded = tokens.clone()
    padded[:, 4:] = -1
    torch.testing.assert_close(log_probs(model, padded, images)[:, :4], short, rtol=1e-6, atol=1e-6)
    hidden, _, is_visible = model.trunk(padded, images)
    assert is_visible.tolist() == [[True] * (PATCHES + 4) + [False] * 3] * 3
    assert hidden.isfinite().all()
    in_front = torch.cat((torch.full((3, 2), -1), tokens[:, :4]), dim=1)
    other = torch.cat((torch.full((3, 2), -7), tokens[:, :4]), dim=1)
    assert torch.equal(log_probs(model, in_front, images)[:, 2:], log_probs(model, other, images)[:, 2:])


def test_vlm_output_of_a_row_does_not_depend_on_the_batch():
    model, (tokens, images) = vlm(), inputs()
    alone = log_probs(model, tokens[1:2], images[1:2])
    torch.testing.assert_close(log_probs(model, tokens, images)[1:2], alone, rtol=1e-5, atol=1e-6)


def test_vlm_keys_and_values_match_a_plain_loop():
    model, (tokens, images) = vlm(), inputs()
    tokens[:, 6] = -1
    x = torch.cat((model.stem(images), model.model.embed_tokens(tokens.clamp(min=0)) * (tokens >= 0)[..., None]), 1)
    length = x.shape[1]
    cos, sin = rotary_table(length, 8, 10000.0, x.device)
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        for column in range(length):
            sees = column <= row or column < PATCHES
            allowed[row, column] = row == column or (sees and column != length - 1)
    _, kept, _ = model.trunk(tokens, images)
    for block, (kept_key, kept_value) in zip(model.model.layers, kept, strict=True):
        normed, attention = block.input_layernorm(x), block.self_attn
        heads = [p(normed).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (attention.k_proj, attention.v_proj)]
        key, value = rotate(heads[0], cos, sin), heads[1]
        torch.testing.assert_close(kept_key, key)
        torch.testing.assert_close(kept_value, value)
        query = rotate(attention.q_proj(normed).unflatten(-1, (-1, 8)).transpose(1, 2), cos, sin)
        scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        x = x + attention.o_proj((weights @ value.repeat_interleave(2, 1)).transpose(1, 2).flatten(-2))
        x = x + block.mlp(block.post_attention_layernorm(x))


@torch.no_grad()
def test_vlm_residual_scalars_scale_the_input_of_each_block():
    model, (tokens, images) = vlm(residual_scalars=True), inputs()
    expected = vlm().trunk(tokens, images)
    for ours, theirs in zip(model.trunk(tokens, images)[1], expected[1], strict=True):
        assert torch.equal(ours[0], theirs[0])
    first, second = model.model.layers
    first.residual_scale.fill_(3.0)
    second.embedding_scale.fill_(0.5)
    x = torch.cat((model.stem(images), model.model.embed_tokens(tokens)), 1)
    entered = []
    for block in (first, second):
        block.input_layernorm.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        block.register_forward_hook(lambda _, args, output: entered.append(output[0]))
    model.observe(tokens, images)
    torch.testing.assert_close(entered[0], 3 * x)
    torch.testing.assert_close(entered[2], entered[1] + 0.5 * x)


def test_vlm_refuses_value_embeddings():
    with pytest.raises(ConfigError, match=r"^model\.value_embeddings: is \[0\] but image patches are no tokens"):
        vlm(value_embeddings=[0])


def test_observe_returns_the_keys_and_values_of_trunk_without_its_tail():
    model, (tokens, images) = vlm(), inputs()
    _, expected, is_visible = model.trunk(tokens, images)
    model.model.layers[-1].mlp.forward = model.model.norm.forward = None
    kept, seen = model.observe(tokens, images)
    assert torch.equal(seen, is_visible)
    for found, known in zip(kept, expected, strict=True):
        assert torch.equal(found[0], known[0])
        assert torch.equal(found[1], known[1])


def loss_of_all(model, tokens, images):
    """Return a loss over the outputs and over the keys and values of every layer."""
    _, kept, _ = model.trunk(tokens, images)
    of_layers = sum((key.square().sum() + value.square().sum()) for key, value in kept)
    return of_layers - log_probs(model, tokens, images).sum()


def gradients(model, *given):
    model.zero_grad()
    loss_of_all(model, *given).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_every_vlm_parameter_gets_a_gradient():
    found = gradients(vlm(num_images=2), *inputs(num_images=2))
    assert [name for name, grad in found.items() if grad is None or not grad.abs().sum() > 0] == []


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointed_vlm_blocks_give_the_same_gradients(selective):
    model = vlm()
    expected = gradients(model, *inputs())
    for block in find_blocks(model):
        block.forward = checkpointed(block.forward, selective=selective)
    found = gradients(model, *inputs())
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


def test_vlm_under_autocast_is_near_fp32_with_a_bf16_residual_stream():
    model, (tokens, images), seen = vlm(init_std=0.05), inputs(), []
    assert list(find_blocks(model)) == list(model.model.layers)
    model.model.layers[1].register_forward_hook(lambda block, args, output: seen.extend([args[0], *output]))
    exact = log_probs(model, tokens, images)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        near = log_probs(model, tokens, images)
    assert {tensor.dtype for tensor in seen} == {torch.bfloat16}
    torch.testing.assert_close(near, exact, rtol=0, atol=0.05)
    assert log_probs(model.bfloat16(), tokens, images).isfinite().all()


def test_vlm_dropout_is_keyed_by_sample_and_used_in_training_only():
    model, (tokens, images) = vlm(hidden_dropout=0.3, attention_dropout=0.3), inputs()
    keys = torch.tensor([5, 6, 7])
    dropped = model(tokens, tokens, images=images, dropout_keys=keys).log_prob
    alone = model(tokens[1:2], tokens[1:2], images=images[1:2], dropout_keys=keys[1:2]).log_prob
    torch.testing.assert_close(alone, dropped[1:2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(dropped, log_probs(model, tokens, images))
    model.eval()
    kept = model(tokens, tokens, images=images, dropout_keys=keys).log_prob
    assert torch.equal(kept, log_probs(model, tokens, images))


def test_vlm_init_weights_fills_a_model_from_the_meta_device():
    with torch.device("meta"):
        model = vlm(tie_embeddings=False)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.init_weights(seed=3)
    other = vlm(tie_embeddings=False)
    other.init_weights(seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
        assert parameter.isfinite().all(), name


def test_vlm_embeddings_have_their_own_init_std():
    model = vlm(tie_embeddings=False, embedding_init_std=0.7)
    model.init_weights(seed=3)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert deviations["model.embed_tokens.weight"] == pytest.approx(0.7, rel=0.1)
    assert deviations["lm_head.weight"] == pytest.approx(0.2, rel=0.1)


def test_vlm_flops_agree_with_the_flop_counter_of_torch():
    from torch.utils.flop_counter import FlopCounterMode

    model, (tokens, images) = vlm(num_images=2), inputs(num_images=2)
    with FlopCounterMode(display=False) as counter:
        log_probs(model, tokens, images).sum().backward()
    counted, length = counter.get_total_flops() / 3, 2 * PATCHES + 7
    # The gradient with respect to pixels is never computed; some attention kernels are not counted.
    of_pixels, attention = 2 * 2 * 8 * 8 * model.stem.conv1.weight.numel(), 12 * 2 * 32 * length**2
    assert model.flops_per_sample(7) - of_pixels - attention <= counted <= model.flops_per_sample(7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "requires images"),
        ({"images": inputs()[1], "cache": object()}, "supports no cache"),
        ({"images": inputs()[1], "documents": torch.zeros(3, 7, dtype=torch.int64)}, "one sample per row"),
    ],
)
def test_invalid_vlm_inputs_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        vlm()(inputs()[0], **given)


def test_too_long_text_and_indivisible_image_size_are_refused():
    tokens, images = inputs(seq_len=13)
    with pytest.raises(ValueError, match="a sequence of 13 tokens exceeds"):
        vlm()(tokens, images=images)
    with pytest.raises(ConfigError, match="is 20 but must be a multiple of 8"):
        vlm(image_size=20)


def test_vlm_has_no_transformers_export_tensor_parallelism_or_cache():
    from foundry.core.model_hooks import hook

    model = vlm()
    assert isinstance(model.model.layers[0], PrefixBlock)
    assert [hook(model, name) for name in ("hf_config", "tensor_parallel_plan", "new_cache")] == [None] * 3
