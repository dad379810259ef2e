"""Dropout keyed by sample, and the dropout of each kind of model."""

import pytest
import torch
from support.composition import configure

from foundry.core.errors import ConfigError
from foundry.models.dropout import KeyedDropout
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer
from foundry.parts.model import build_model

KEYS = torch.tensor([3, -(2**62), 2**62])
SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}


def keyed(size, keys=KEYS):
    return KeyedDropout(keys[:, None], torch.arange(size)[None])


def dropped(draws, size=64, probability=0.3):
    return draws.hidden(torch.ones(len(draws.keys), size, size), probability) == 0


def test_keyed_dropout_has_the_given_rate_and_keeps_the_mean():
    x = torch.ones(3, 200, 100)
    out = keyed(200).hidden(x, 0.3)
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert out.mean((1, 2)).tolist() == pytest.approx([1, 1, 1], abs=0.02)
    assert torch.equal(keyed(200).hidden(x, 0.0), x)
    assert keyed(50).attention(torch.ones(3, 4, 50, 50), 0.3).mean() == pytest.approx(1, abs=0.02)


def test_keyed_dropout_is_independent_over_samples_layers_and_positions():
    draws = keyed(64)
    found = dropped(draws)
    others = [dropped(draws.fold(0)), dropped(draws.fold(1)), dropped(draws.fold(0).fold(1)), found.roll(1, 0)]
    for other in [*others, found.roll(1, 1), found.roll(1, 2)]:
        assert (found & other).double().mean() == pytest.approx(0.09, abs=0.01)


def test_keyed_dropout_depends_only_on_key_and_position():
    draws, one = keyed(9), keyed(5, KEYS[1:2])
    assert torch.equal(draws.hidden(torch.ones(3, 9, 8), 0.5)[1:2, :5], one.hidden(torch.ones(1, 5, 8), 0.5))
    whole, part = torch.ones(3, 2, 9, 9), torch.ones(1, 2, 5, 5)
    assert torch.equal(draws.attention(whole, 0.5)[1:2, :, :5, :5], one.attention(part, 0.5))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_attention_with_negligible_dropout_matches_plain_attention(num_kv_heads):
    torch.manual_seed(0)
    model = Transformer(**SIZES, num_kv_heads=num_kv_heads, max_seq_len=9, init_std=0.3, attention_dropout=1e-16)
    tokens = torch.randint(30, (3, 9))
    with_keys = model(tokens, tokens, dropout_keys=KEYS).log_prob
    torch.testing.assert_close(with_keys, model(tokens, tokens).log_prob, rtol=1e-5, atol=1e-6)


def make_hf(architecture, **options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    if architecture == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0}
    torch.manual_seed(0)
    made = HuggingFaceCausalLM(
        path=None, architecture=architecture, config=sizes, vocab_size=30, max_seq_len=16, init_std=0.3, **options
    )
    return made.train()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout"])
def test_transformers_models_apply_the_dropout_of_their_architecture(architecture, name):
    if (architecture, name) == ("llama", "hidden_dropout"):
        with pytest.raises(ConfigError) as refused:
            make_hf(architecture, hidden_dropout=0.1)
        expected = "objective.hidden_dropout: is 0.1 but transformers' llama has no hidden dropout; set it to null"
        assert str(refused.value) == expected
        return
    tokens = torch.arange(12).view(1, -1)
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    for share, differs in ((0.5, True), (0.0, False)):
        model = make_hf(architecture, **(none | {name: share}))
        first, second = (model(tokens, tokens).log_prob for _ in range(2))
        assert (not torch.equal(first, second)) == differs
    assert make_hf(architecture, **none).hf_config().to_dict() == make_hf(architecture).hf_config().to_dict()


class Own(torch.nn.Module):
    """A user's model with an argument for attention dropout."""

    def __init__(self, attention_dropout=0.0):
        super().__init__()
        self.attention_dropout = attention_dropout


def test_user_model_gets_only_the_dropout_arguments_it_accepts():
    sft = ["data=arithmetic", "objective=sft"]
    own = {"_target_": f"{__name__}.Own"}
    assert build_model(configure(*sft, "objective.attention_dropout=0.2"), own).attention_dropout == 0.2
    with pytest.raises(
        ConfigError, match=r"^objective.hidden_dropout: is 0.1 but the model, .*Own, does not take this argu"
    ):
        build_model(configure(*sft, "objective.hidden_dropout=0.1"), own)
    with pytest.raises(ConfigError, match=r"^objective.hidden_dropout: is 1 but must be below 1"):
        configure(*sft, "objective.hidden_dropout=1.0")
