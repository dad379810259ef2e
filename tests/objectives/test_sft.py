"""Supervised fine-tuning: counted tokens, and independence of microbatches."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch.nn.functional import log_softmax

from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer
from foundry.objectives.next_token import NextToken
from foundry.objectives.sft import SFT

VOCAB = 40


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    return Transformer(vocab_size=VOCAB, max_seq_len=16, init_std=0.3, **sizes, **changes)


def rows(seed=0, number=8):
    """Return rows of 2 to 12 tokens, each a prompt and an answer; the last row has no trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        length = int(torch.randint(3, 14, (), generator=generator))
        tokens = torch.randint(VOCAB, (length,), generator=generator)
        targets = tokens[1:].clone()
        targets[: length // 2] = -100
        if index == number - 1:
            targets[:] = -100
        found.append((tokens[:-1], targets))
    return found


def microbatch(found, first=0):
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "tokens": pad([tokens for tokens, _ in found], batch_first=True),
        "targets": pad([targets for _, targets in found], batch_first=True, padding_value=-100),
        "position": torch.arange(first, first + len(found)),
    }


def gradients(model, objective, parts):
    model.zero_grad()
    count = sum(objective.num_valid(part) for part in parts)
    losses = [objective.loss(model, part) for part in parts]
    (sum(part.loss for part in losses) / count).backward()
    correct = [part.metrics["accuracy"] for part in losses]
    accuracy = sum(float(m.sum) for m in correct) / sum(int(m.count) for m in correct)
    return sum(part.loss.item() for part in losses) / count, accuracy, [p.grad.clone() for p in model.parameters()]


DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


@pytest.mark.parametrize("options", [{}, {"sft_average_log_probs": True}, {"z_loss_coefficient": 0.1}, DROPOUT])
@settings(max_examples=examples(10), deadline=None)
@given(cuts=st.sets(st.integers(1, 7)), seed=st.integers(0, 50))
def test_sft_loss_and_gradients_do_not_depend_on_microbatches(options, cuts, seed):
    model = make_model(**(options if options is DROPOUT else {})).double()
    objective, found = SFT(**options), rows(seed)
    bounds = [0, *sorted(cuts), len(found)]
    parts = [microbatch(found[a:b], a) for a, b in itertools.pairwise(bounds)]
    loss, accuracy, whole = gradients(model, objective, [microbatch(found)])
    other_loss, other_accuracy, cut = gradients(model, objective, parts)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_accuracy == accuracy
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


def test_sft_loss_averages_over_answer_tokens_or_over_samples():
    model, found = make_model(), rows()
    per_row = []
    for tokens, targets in found:
        log_probs = log_softmax(model(tokens[None], return_logits=True).logits[0].float(), -1)
        per_row.append([-float(log_probs[i, t].detach()) for i, t in enumerate(targets.tolist()) if t != -100])
    assert per_row[-1] == []
    tokens = [value for row in per_row for value in row]
    batch = microbatch(found)
    objective, averaging = SFT(), SFT(sft_average_log_probs=True)
    assert objective.num_valid(batch) == len(tokens)
    assert objective.loss(model, batch).loss.item() == pytest.approx(sum(tokens), rel=1e-5)
    assert averaging.num_valid(batch) == len(found) - 1
    expected = sum(sum(row) / len(row) for row in per_row if row)
    assert averaging.loss(model, batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_sft_with_every_token_trained_matches_next_token():
    model = make_model()
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "position": torch.arange(4)}
    for options in ({}, {"z_loss_coefficient": 0.01}):
        ours, theirs = SFT(**options).loss(model, batch), NextToken(**options).loss(model, batch)
        assert torch.equal(ours.loss, theirs.loss) or ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)


def test_sft_dropout_is_keyed_by_seed_and_sample_in_training_only():
    found, model = rows(), make_model(**DROPOUT)

    def loss(seed=0, first=0):
        return SFT(**DROPOUT, seed=seed).loss(model, microbatch(found, first)).loss.item()

    assert loss() == loss()
    assert len({loss(), loss(seed=1), loss(first=8)}) == 3
    model.eval()
    assert loss() == loss(seed=1) == SFT().loss(make_model(), microbatch(found)).loss.item()


def test_prompt_and_padding_tokens_get_no_gradient():
    model, batch = make_model(), microbatch(rows())
    embedded = []

    def keep(module, args, output):
        output.retain_grad()
        embedded.append(output)

    model.model.norm.register_forward_hook(keep)
    SFT().loss(model, batch).loss.backward()
    moved = embedded[0].grad.abs().sum(-1) > 0
    assert torch.equal(moved, batch["targets"] != -100)


def test_padding_and_rows_without_answers_are_ignored_by_sft():
    model, found = make_model(), rows()
    batch, padded = microbatch(found[:4]), microbatch(found)
    padded["position"][4:] = -1
    for objective in (SFT(), SFT(sft_average_log_probs=True)):
        assert objective.num_valid(padded) == objective.num_valid(batch)
        one, other = objective.loss(model, batch), objective.loss(model, padded)
        assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-6)
        empty = objective.loss(model, microbatch(found[-1:]))
        assert empty.loss.item() == 0.0
        assert empty.loss.requires_grad


@pytest.mark.parametrize("tile", [0, 3])
def test_sft_accuracy_is_the_rate_of_argmax_matches(tile):
    model, batch = make_model(logprob_tile_tokens=tile), microbatch(rows())
    logits, targets = model(batch["tokens"], return_logits=True).logits, batch["targets"]
    accuracy = SFT().loss(model, batch).metrics["accuracy"]
    assert int(accuracy.count) == int((targets != -100).sum())
    assert float(accuracy.sum) == int((logits.argmax(-1) == targets).sum())


def test_sft_works_with_transformers_models():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = HuggingFaceCausalLM(path=None, architecture="llama", config=sizes, vocab_size=VOCAB, max_seq_len=16)
    batch = microbatch(rows())
    found = SFT().loss(model, batch)
    logits = model(batch["tokens"], return_logits=True).logits
    assert float(found.metrics["accuracy"].sum) == int((logits.argmax(-1) == batch["targets"]).sum())
    assert found.loss.item() > 0
