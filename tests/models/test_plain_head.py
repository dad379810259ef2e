import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.token_loss import TokenLoss, ask_for_loss

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
ROTARY = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 1}
ARCHITECTURES = {
    "llama": (ROTARY, True),
    "qwen2": (ROTARY, True),
    "gpt2": (GPT2, True),
    "gpt_neox": ({**SMALL, "intermediate_size": 64}, True),
    "opt": ({**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}, False),  # OPT does not call its base model.
    "gemma2": ({**ROTARY, "head_dim": 16}, False),  # Gemma 2 caps logits.
    "cohere": (ROTARY, False),  # Cohere scales logits.
    "granite": ({**ROTARY, "logits_scaling": 2.0}, False),
    "phi": ({**SMALL, "intermediate_size": 64}, False),  # Phi adds a bias to logits.
}


def build(architecture):
    torch.manual_seed(0)
    fields, _ = ARCHITECTURES[architecture]
    return HuggingFaceCausalLM(path=None, architecture=architecture, config=fields, vocab_size=50, max_seq_len=32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_head_is_detected_and_gives_the_same_loss(architecture):
    model = build(architecture).eval()
    assert model._has_plain_head is ARCHITECTURES[architecture][1]
    tokens = torch.randint(50, (2, 9))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(2, 9) < 0.3, -100)
    logits = model.causal_lm(input_ids=tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    found = ask_for_loss(model, tokens, targets, TokenLoss(finds_correct=True))
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(-model(tokens, targets).log_prob.sum(), expected)
    assert torch.equal(found.correct, logits.argmax(-1) == targets)
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (found.loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    with FakeTensorMode():
        assert build(architecture)._has_plain_head is ARCHITECTURES[architecture][1]
