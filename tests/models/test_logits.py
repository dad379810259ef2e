import copy
import inspect

import pytest
import torch
from support.toy import SEQ, VOCAB, Toy

from foundry.core.errors import ConfigError
from foundry.models.logits import answer_with_log_probs
from foundry.models.token_log_probs import read_log_probs


class OfTargets(Toy):
    """A model with required targets as its second parameter, named differently, that returns logits."""

    def forward(self, tokens, following):
        assert following is not None
        return super().forward(tokens)


class Optional(Toy):
    def forward(self, tokens, mask=None, scale=1.0):
        assert mask is None
        return scale * super().forward(tokens)


class Spoken(Toy):
    """A model that returns log-probabilities and accepts none of foundry's keywords."""

    def forward(self, idx, labels=None):
        return read_log_probs(super().forward(idx), labels)


class Decorated(Toy):
    """A model whose `forward` is declared with any arguments, as after a decorator."""

    def forward(self, *arguments, **options):
        return read_log_probs(Toy.forward(self, arguments[0]), arguments[1], **options)


class Unspoken(Toy):
    """A model that returns log-probabilities and whose targets parameter foundry cannot recognize."""

    def forward(self, tokens, y=None):
        return read_log_probs(super().forward(tokens), y)


class Returns(Toy):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, tokens, **_):
        return self.change(super().forward(tokens))


def inputs():
    tokens = torch.arange(3 * SEQ).view(3, SEQ) % VOCAB
    targets = tokens.roll(-1, 1).clone()
    targets[0, :2] = -100
    return tokens, targets


def largest(logits, targets, weights):
    return {"largest": logits.amax(-1) * weights}


@pytest.mark.parametrize("kind", [Toy, OfTargets, Optional])
@pytest.mark.parametrize("tile_tokens", [0, 4])
def test_logits_models_match_log_prob_models_bit_for_bit(kind, tile_tokens):
    (tokens, targets), weights = inputs(), torch.linspace(0.5, 1.5, 3 * SEQ).view(3, SEQ)
    asked = {"return_logits": True, "read": largest, "per_token": (weights,)}
    answering, plain = kind(), Toy()
    answer_with_log_probs(answering, tile_tokens=tile_tokens, vocab_size=VOCAB)
    ours = answering(tokens, targets, **asked)
    expected = read_log_probs(plain(tokens), targets, tile_tokens=tile_tokens, **asked)
    assert torch.equal(ours.log_prob, expected.log_prob)
    assert torch.equal(ours.logits, expected.logits)
    for model, answer in ((answering, ours), (plain, expected)):
        (answer.log_prob.sum() + answer.logsumexp.square().sum() + answer.read["largest"].sum()).backward()
        assert model.temperature.grad is not None
    for (name, one), other in zip(answering.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_logits_model_without_targets_returns_logits_only():
    tokens, _ = inputs()
    model = Toy()
    answer_with_log_probs(model)
    answer = model(tokens, return_logits=True)
    assert torch.equal(answer.logits, Toy()(tokens))
    assert answer.log_prob.shape == (3, 0)


def test_wrapped_forward_signature_merges_objective_and_model_keywords():
    model = Optional()
    answer_with_log_probs(model)
    names = list(inspect.signature(model.forward).parameters)
    assert names[:2] == ["tokens", "targets"]
    assert set(names[2:]) == {"return_logits", "read", "per_token", "mask", "scale"}
    tokens, targets = inputs()
    halved = model(tokens, targets, return_logits=True, scale=0.5).logits
    assert torch.equal(halved, 0.5 * Toy()(tokens))


def test_copied_logits_model_computes_with_its_own_weights():
    tokens, targets = inputs()
    model = Toy()
    answer_with_log_probs(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.temperature.zero_()
    assert torch.equal(model(tokens, targets).log_prob, read_log_probs(Toy()(tokens), targets).log_prob)
    assert not torch.equal(copied(tokens, targets).log_prob, model(tokens, targets).log_prob)


@pytest.mark.parametrize("kind", [Spoken, Decorated])
def test_log_probs_of_a_model_are_passed_through(kind):
    tokens, targets = inputs()
    model = kind()
    answer_with_log_probs(model)
    assert torch.equal(model(tokens, targets).log_prob, kind()(tokens, targets).log_prob)


@pytest.mark.parametrize(
    ("kind", "options", "asked", "message"),
    [
        (Unspoken, {}, {}, "model: is Unspoken, whose forward() returns log-probabilities and does not take targets"),
        (
            Spoken,
            {},
            {"read": largest},
            "model: is Spoken, whose forward() returns log-probabilities and does not take read",
        ),
        (Spoken, {"tile_tokens": 4}, {}, "objective.logprob_chunk_size: is 4 but the model, Spoken, computes"),
    ],
)
def test_log_prob_model_that_ignores_a_request_is_refused(kind, options, asked, message):
    tokens, targets = inputs()
    model = kind()
    answer_with_log_probs(model, **options)
    with pytest.raises(ConfigError) as refused:
        model(tokens, targets, **asked)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda logits: logits.mean(), "a scalar"),
        (lambda logits: (logits, logits.mean()), f"a tuple (a tensor of shape (3, {SEQ}, {VOCAB}), a scalar)"),
        (lambda logits: (logits, None), f"a tuple (a tensor of shape (3, {SEQ}, {VOCAB}), None)"),
        (lambda logits: logits[:, -1:], f"a tensor of shape (3, 1, {VOCAB})"),
        (lambda logits: logits.flatten(0, 1), f"a tensor of shape ({3 * SEQ}, {VOCAB})"),
        (lambda logits: {"logits": logits}, "an object of type dict"),
        (lambda logits: None, "None"),
    ],
)
def test_invalid_model_output_is_refused_with_the_expected_shape(change, said):
    tokens, targets = inputs()
    model = Returns(change)
    answer_with_log_probs(model)
    with pytest.raises(ConfigError) as refused:
        model(tokens, targets)
    remedy = f"return only logits, (3, {SEQ}, vocab), before softmax and loss"
    assert str(refused.value) == (
        f"model: is Returns, whose forward() returns {said} for tokens of shape (3, {SEQ}); {remedy}"
    )


def test_logits_narrower_than_the_vocabulary_are_refused():
    model = Toy()
    answer_with_log_probs(model, vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match=rf"logits of {VOCAB} tokens, fewer than data.vocab_size={VOCAB + 1}"):
        model(*inputs())
