import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from foundry.config.schemas.model import Transformer as TransformerSettings
from foundry.core.errors import ConfigError
from foundry.models.decoder.block import TransformerBlock
from foundry.models.decoder.rotary import rotary_table
from foundry.models.fsdp_block import find_blocks
from foundry.models.transformer import Transformer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "max_seq_len": 16,
}
VARIANTS = [
    {},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "tie_embeddings": True},
    {"rope_theta": 500.0},
    {"norm_eps": 0.1},
    {"qk_norm": True, "num_kv_heads": 2, "norm_eps": 0.1},
]


def make(**changes):
    torch.manual_seed(0)
    return Transformer(**{**SIZES, "init_std": 0.2, **changes})


def as_llama(model):
    """Return the exported model, of transformers' Llama class or, with `qk_norm`, of its Qwen3 class."""
    llama = AutoModelForCausalLM.from_config(model.hf_config())
    missing, unexpected = llama.load_state_dict(model.export_state(model.state_dict()), strict=False)
    assert unexpected == []
    assert missing == ([] if model.lm_head is not None else ["lm_head.weight"])
    return llama


def batch(seq=16, vocab=61):
    tokens = torch.randint(vocab, (3, seq + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[1, 4:9] = -100
    return tokens[:, :-1], targets


@torch.no_grad()
def test_norm_eps_is_added_to_the_mean_square():
    model, (tokens, _) = make(norm_eps=1e8), batch()  # Every norm divides by 10,000.
    expected = model.lm_head(model.model.embed_tokens(tokens)) / 1e4
    torch.testing.assert_close(model(tokens, return_logits=True).logits, expected, rtol=0, atol=1e-3 * expected.std())


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_loss_and_gradients_match_transformers_llama(changes):
    model, (tokens, targets) = make(**changes), batch()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # the initial ones would hide a norm that is applied to another tensor
                parameter.uniform_(0.5, 1.5)
    llama = as_llama(model)
    assert llama.config.rope_parameters["rope_theta"] == changes.get("rope_theta", 1e4)
    output = model(tokens, targets, return_logits=True)
    theirs = llama(tokens).logits
    torch.testing.assert_close(output.logits, theirs, rtol=1e-5, atol=1e-5)

    loss = -output.log_prob.sum() / (targets != -100).sum()
    their_loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    their_loss.backward()
    their_gradients = {name: parameter.grad for name, parameter in llama.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, their_gradients[name], rtol=1e-4, atol=1e-6)


def test_zero_outputs_make_the_initial_model_independent_of_its_blocks():
    model, (tokens, _) = make(zero_init_outputs=True), batch()
    expected = model.lm_head(model.model.norm(model.model.embed_tokens(tokens)))
    torch.testing.assert_close(model(tokens, return_logits=True).logits, expected)
    zeros = {name for name, parameter in model.named_parameters() if not parameter.any()}
    outputs = ("self_attn.o_proj", "mlp.down_proj")
    assert zeros == {f"model.layers.{index}.{name}.weight" for index in range(2) for name in outputs}


@pytest.mark.parametrize("tied", [False, True])
def test_auto_model_loads_the_exported_folder(tmp_path, tied):
    from safetensors.torch import save_file

    model, (tokens, _) = make(tie_embeddings=tied, num_kv_heads=2), batch()
    model.hf_config().save_pretrained(tmp_path)
    state = {name: value.contiguous() for name, value in model.export_state(model.state_dict()).items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_tiled_head_gives_the_same_loss_and_gradients():
    tokens, targets = batch()
    results = []
    for tile in (0, 5):
        model = make(logprob_tile_tokens=tile)
        output = model(tokens, targets)
        (output.log_prob.sum() + output.logsumexp.square().sum()).backward()
        results.append((output.log_prob.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_autocast_matches_bf16_weights_with_a_bf16_residual_stream():
    tokens, targets = batch()
    model = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        amp = model(tokens, targets)
        assert model.model(tokens, *rotary_table(16, 8, 1e4, tokens.device)).dtype == torch.bfloat16
    bf16 = make().to(torch.bfloat16)(tokens, targets)
    assert amp.log_prob.dtype == bf16.log_prob.dtype == torch.float32
    torch.testing.assert_close(amp.log_prob, bf16.log_prob, rtol=0, atol=0)


def test_attention_is_causal():
    model, (tokens, _) = make(), batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_initial_weights_have_the_given_std_and_uniform_loss():
    model = Transformer(**{**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_layers": 8})
    block = model.model.layers[3]
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight, block.self_attn.q_proj.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    loss = -model(*batch()).log_prob.sum() / (batch()[1] != -100).sum()
    assert loss.item() == pytest.approx(math.log(61), abs=0.2)


def test_init_weights_fills_a_model_from_the_meta_device():
    with torch.device("meta"):
        model = Transformer(**SIZES)
    model.to_empty(device="cpu")
    model.init_weights()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert model(batch()[0]).logits.isfinite().all()


def test_flops_count_matrix_products_and_attention():
    model = make(num_kv_heads=2)
    per_layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    matmul = 2 * per_layer + 61 * 32
    assert model.flops_per_sample(16) == 16 * (6 * matmul + 12 * 2 * 4 * 8 * 16)
    assert make(num_kv_heads=2, tie_embeddings=True).flops_per_sample(16) == model.flops_per_sample(16)


def test_settings_object_and_keywords_give_the_same_model():
    values = {**SIZES, "init_std": "wang", "tie_embeddings": True}
    one = make(**values)
    torch.manual_seed(0)
    other = Transformer(TransformerSettings(**values), hidden_dropout=0.5)
    assert [block.dropout for block in other.model.layers] == [0.5, 0.5]
    assert other.settings == one.settings == TransformerSettings(**values)
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)


def test_find_blocks_returns_transformer_blocks():
    assert [type(block) for block in find_blocks(make())] == [TransformerBlock] * 2


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_heads": 3}, "model.num_heads"),
        ({"num_heads": 32}, "model.num_heads"),
        ({"num_kv_heads": 3}, "model.num_kv_heads"),
    ],
)
def test_indivisible_heads_are_a_config_error(changes, key):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert caught.value.violations[0].key == key


def test_sequence_longer_than_max_seq_len_is_refused():
    with pytest.raises(ValueError, match="max_seq_len=16"):
        make()(torch.zeros(1, 17, dtype=torch.int64))
