"""Continuous batches give the same continuations as one prompt at a time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.generation.decoding import Decoding, generate
from foundry.generation.places import Places
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer

VOCAB, CONTEXT = 40, 32
CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MISTRAL = {**LLAMA, "num_key_value_heads": 2, "sliding_window": 5, "initializer_range": 0.3}
DECODING = Decoding(max_new_tokens=12, temperature=1.3, stop_ids=frozenset({3, 7, 11, 20}), keeps_log_probs=True)


def make(name):
    torch.manual_seed(3)
    if name == "transformer":
        return Transformer(vocab_size=VOCAB, max_seq_len=CONTEXT, init_std=0.3, **SIZES).eval()
    sizes = {"vocab_size": VOCAB, "max_seq_len": CONTEXT, "init_std": None}
    return HuggingFaceCausalLM(path=None, architecture=name, config=MISTRAL, **sizes).eval()


MODELS = {name: make(name) for name in ("transformer", "mistral")}


def continued(model, prompts, decoding, **options):
    return generate(model, prompts, decoding, context=CONTEXT, device=CPU, **options)


def record_rows(model, run):
    """Return the result of `run`, and the rows and columns of each forward pass."""
    shapes = []
    handle = model.register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape)))
    result = run()
    handle.remove()
    return result, shapes


def assert_close(found, expected):
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.is_ended for one in found] == [one.is_ended for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@settings(derandomize=True, max_examples=examples(30), deadline=None)
@given(
    st.lists(st.tuples(PROMPTS, st.integers(1, 4)), min_size=1, max_size=7),
    st.integers(1, 9),
    st.sampled_from([1, 6, 12, 20]),
    st.sets(st.integers(0, VOCAB - 1), max_size=12),
    st.sampled_from(["transformer", "mistral"]),
    st.sampled_from([0.0, 1.3]),
    st.booleans(),
)
@example([([1], 1), ([2], 1), ([*range(20)], 3)], 2, 20, {3}, "transformer", 1.3, True)
def test_continuous_batches_match_one_prompt_at_a_time(groups, size, length, stops, name, temperature, slides):
    """With 14 tokens and 20 new ones a sequence outgrows the context, and prompts are continued in chunks."""
    prompts = [prompt for prompt, repeats in groups for _ in range(repeats)]
    decoding = replace(DECODING, max_new_tokens=length, stop_ids=frozenset(stops), temperature=temperature)
    model = MODELS[name]
    alone = continued(model, prompts, decoding, batch_size=1, is_sliding=slides)
    assert_close(continued(model, prompts, decoding, batch_size=size, is_sliding=slides), alone)


def test_rows_stay_full_while_prompts_wait(monkeypatch):
    live, enter = [], Places.enter

    def spy(self, num_taken):
        entering = enter(self, num_taken)
        live.append((num_taken + len(entering), entering.stop))
        return entering

    model, prompts = MODELS["transformer"], [[1, 2, number // 2] for number in range(40)]
    _, chunk_shapes = record_rows(model, lambda: in_chunks(model, prompts, 8))
    monkeypatch.setattr(Places, "enter", spy)
    _, shapes = record_rows(model, lambda: continued(model, prompts, DECODING, batch_size=8))
    waiting = [rows for rows, end in live[: [end for _, end in live].index(40)]]
    assert len(waiting) > 20
    assert set(waiting) == {7, 8}
    assert sum(rows for rows, columns in shapes if columns == 3) == 20, "a prompt is read once for two continuations"
    assert max(rows for rows, columns in shapes) == 8
    steps, chunk_steps = (sum(columns == 1 for _, columns in passes) for passes in (shapes, chunk_shapes))
    assert steps < 0.75 * chunk_steps


def in_chunks(model, prompts, size):
    starts = range(0, len(prompts), size)
    return [one for start in starts for one in continued(model, prompts[start : start + size], DECODING)]


def test_model_whose_cache_cannot_merge_continues_chunks(monkeypatch):
    model, prompts = MODELS["transformer"], [[1, 2, number] for number in range(10)]
    expected = continued(model, prompts, DECODING, batch_size=4)
    monkeypatch.setattr("foundry.models.kv_cache.KVCache.can_merge", False)
    found, shapes = record_rows(model, lambda: continued(model, prompts, DECODING, batch_size=4))
    assert_close(found, expected)
    assert [rows for rows, columns in shapes if columns == 3] == [4, 4, 2]
    reads = [index for index, (_, columns) in enumerate(shapes) if columns == 3]
    assert all(index > 1 for index in reads[1:])


def test_lockstep_continues_chunks_of_equal_steps():
    model, prompts = MODELS["transformer"], [[1, 2, number] for number in range(10)]
    expected = continued(model, prompts, DECODING, batch_size=4)
    found, shapes = record_rows(model, lambda: continued(model, prompts, DECODING, batch_size=4, in_lockstep=True))
    assert_close(found, expected)
    assert len(shapes) == 3 * DECODING.max_new_tokens


def test_bfloat16_log_probs_match_one_prompt_at_a_time_to_its_precision():
    """A rounding error can change a token, so the log-probabilities of equal prefixes are compared."""
    model, prompts = MODELS["transformer"], [[1, 2, number // 3] for number in range(18)]
    with torch.autocast("cpu", torch.bfloat16):
        found = continued(model, prompts, DECODING, batch_size=6)
        alone = continued(model, prompts, DECODING, batch_size=1)
    num_equal = 0
    for one, other in zip(found, alone, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        length = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        num_equal += length
        assert one.log_probs[:length] == pytest.approx(other.log_probs[:length], abs=0.1)
    assert num_equal > 0.8 * sum(len(one.tokens) for one in alone)
