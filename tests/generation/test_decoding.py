"""Continuations by `generate` match a loop without cache and batches, and are independent of batches."""

import pytest
import torch
from torch import nn

from foundry.generation.decoding import Decoding, generate
from foundry.models.token_log_probs import TokenLogProbs
from foundry.models.transformer import Transformer

VOCAB, CONTEXT = 40, 32
CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [4], [12, 13]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(vocab_size=VOCAB, max_seq_len=CONTEXT, init_std=0.3, **sizes)


@torch.no_grad()
def plainly(model, prompt, number, stop=frozenset()):
    tokens = list(prompt)
    for _ in range(number):
        logits = model(torch.tensor([tokens[-CONTEXT:]]), return_logits=True).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stop:
            break
    return tuple(tokens[len(prompt) :])


def continued(model, prompts=PROMPTS, **options):
    own = {name: options.pop(name) for name in ("batch_size", "keys", "is_sliding", "in_lockstep") if name in options}
    return generate(model, prompts, Decoding(**options), context=CONTEXT, device=CPU, **own)


def test_greedy_batches_match_a_plain_loop_beyond_the_context(model):
    for number in (1, 12, 40):
        expected = [plainly(model, prompt, number) for prompt in PROMPTS]
        assert [c.tokens for c in continued(model, max_new_tokens=number)] == expected
        assert not any(c.is_ended for c in continued(model, max_new_tokens=number))


def test_each_stop_token_ends_a_continuation(model):
    whole = [plainly(model, prompt, 20) for prompt in PROMPTS]
    stop = frozenset({whole[0][5], whole[2][9]})
    found = continued(model, max_new_tokens=20, stop_ids=stop)
    assert [c.tokens for c in found] == [plainly(model, prompt, 20, stop) for prompt in PROMPTS]
    assert [c.is_ended for c in found] == [any(token in stop for token in tokens) for tokens in whole]
    assert all(c.tokens == (*c.answer, c.tokens[-1]) for c in found if c.is_ended)
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    assert found == continued(model, max_new_tokens=20, stop_ids=stop, in_lockstep=True)
    handle.remove()
    assert len(calls) == 20, "a rank stopped before the other ranks had finished"


def test_samples_do_not_depend_on_batches_or_order(model):
    options = {"max_new_tokens": 25, "temperature": 1.2, "top_k": 20, "top_p": 0.95, "seed": 5, "stop_ids": {7, 8}}
    whole = continued(model, **options)
    assert whole == continued(model, **options, batch_size=2)
    assert whole == continued(model, **options, batch_size=1)
    keys = [4, 3, 2, 1, 0]
    assert whole[::-1] == continued(model, PROMPTS[::-1], **options, keys=keys)
    assert whole[1] != whole[3], "the same prompt at two places"
    assert whole != continued(model, **{**options, "seed": 6})
    shorter = continued(model, **{**options, "max_new_tokens": 9})
    assert [c.tokens for c in shorter] == [c.tokens[:9] for c in whole]


def test_repeated_prompt_is_prefilled_once(model):
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 2, "keeps_log_probs": True}
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    shapes = []
    handle = model.register_forward_hook(lambda module, given, output: shapes.append(tuple(given[0].shape)))
    found = continued(model, prompts, **options)
    handle.remove()
    assert shapes == [(3, 7), *[(6, 1)] * 8]
    alone = continued(model, prompts, **options, batch_size=1)
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    for one, other in zip(found, alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert len({one.tokens for one in found}) == 6


def test_samples_follow_the_distribution_of_the_model(model):
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2]]), return_logits=True).logits[0, -1].softmax(-1)
    drawn = continued(model, [[1, 2]] * 2000, max_new_tokens=1, temperature=1.0, batch_size=500)
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in drawn]), minlength=VOCAB) / 2000
    assert (counts - expected).abs().max() < 0.035


def test_tiny_temperature_top_k_1_and_tiny_top_p_are_greedy(model):
    greedy = continued(model, max_new_tokens=8)
    for filters in ({"temperature": 1e-38}, {"temperature": 2.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}):
        assert continued(model, max_new_tokens=8, **filters) == greedy


def test_user_model_without_a_cache_generates_the_same_tokens(model):
    class Plain(nn.Module):
        """A model without a cache, with only the arguments that objectives need."""

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, tokens, targets=None, *, return_logits=False):
            return TokenLogProbs(None, None, self.inner(tokens, return_logits=True).logits)

    assert continued(Plain(), max_new_tokens=12) == continued(model, max_new_tokens=12)


def test_nonsliding_generation_stops_at_the_context_length(model):
    found = continued(model, max_new_tokens=40, is_sliding=False)
    expected = [plainly(model, prompt, min(40, CONTEXT - len(prompt))) for prompt in PROMPTS]
    assert [c.tokens for c in found] == expected
    whole = [list(range(CONTEXT)), [1]]
    assert [len(c.tokens) for c in continued(model, whole, max_new_tokens=3, is_sliding=False)] == [0, 3]


def test_generate_restores_the_training_mode(model):
    assert model.train().training
    continued(model, max_new_tokens=1)
    assert model.training
