"""Logits with a KV cache match logits without, for models of foundry and transformers, any chunks, padded batches."""

import pytest
import torch

from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer

VOCAB, CONTEXT = 61, 24
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SLIDING = {**LLAMA, "sliding_window": 5}


def transformer(**sizes):
    given = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **sizes}
    return Transformer(vocab_size=VOCAB, max_seq_len=CONTEXT, init_std=0.2, **given)


def of_transformers(architecture, config):
    sizes = {"vocab_size": VOCAB, "max_seq_len": CONTEXT}
    return HuggingFaceCausalLM(path=None, architecture=architecture, config=config, init_std=None, **sizes)


MODELS = {
    "transformer": transformer,
    "tied": lambda: transformer(num_kv_heads=4, tie_embeddings=True),
    "llama": lambda: of_transformers("llama", {**LLAMA, "num_key_value_heads": 2, "initializer_range": 0.2}),
    "gpt2": lambda: of_transformers("gpt2", {**GPT2, "initializer_range": 0.2}),
    "mistral": lambda: of_transformers("mistral", {**SLIDING, "num_key_value_heads": 2, "initializer_range": 0.2}),
    "eager": lambda: of_transformers("llama", {**LLAMA, "num_key_value_heads": 4, "attn_implementation": "eager"}),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(1)
    return MODELS[request.param]().eval()


def last_logits(model, tokens, **cache):
    return model(tokens, return_logits=True, **cache).logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * 20, [7] + [1] * 13, [20], [3, 5, 1, 11]], ids=str)
def test_cached_logits_match_for_any_chunk_sizes(model, pieces):
    tokens = torch.randint(0, VOCAB, (3, 20))
    cache, start = model.new_cache(20), 0
    for piece in pieces:
        logits = last_logits(model, tokens[:, start : start + piece], cache=cache)
        start += piece
        expected = last_logits(model, tokens[:, :start])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@torch.no_grad()
def test_cached_logits_match_for_left_padded_batches(model):
    sequences = [torch.randint(0, VOCAB, (length,)) for length in (9, 1, 4, 9)]
    more = torch.randint(0, VOCAB, (4, 10))
    padding = torch.tensor([9 - len(sequence) for sequence in sequences])
    padded = torch.stack([torch.cat((torch.zeros(9 - len(s), dtype=torch.int64), s)) for s in sequences])
    cache, rows = model.new_cache(19, padding), [0, 1, 2, 3]
    for column in range(11):
        tokens = padded if column == 0 else more[rows, column - 1 : column]
        logits = last_logits(model, tokens, cache=cache)
        for place, row in enumerate(rows):
            expected = last_logits(model, torch.cat((sequences[row], more[row, :column]))[None])[0]
            torch.testing.assert_close(logits[place], expected, atol=1e-5, rtol=1e-5)
            assert logits[place].argmax() == expected.argmax()
        if column == 4:
            rows = [1, 3]
            cache.keep(torch.tensor(rows))


def test_training_without_a_cache_reaches_all_weights():
    model = transformer()
    tokens = torch.randint(0, VOCAB, (2, 12))
    model(tokens, tokens).log_prob.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_recurrent_model_has_no_kv_cache():
    config = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    assert of_transformers("mamba", config).new_cache(4) is None


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(6, 6), (7, 2, 5)], ids=str)
@pytest.mark.parametrize("order", ["grouped", "mixed"])
def test_continuations_share_the_columns_of_their_prompt(model, lengths, order):
    """Half of the continuations, and in one case all of a prompt, are dropped after three tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    longest, padding = max(lengths), torch.tensor([max(lengths) - length for length in lengths])
    cache = model.new_cache(longest + 6, padding if padding.any() else None)
    tokens = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    last_logits(model, tokens, cache=cache)
    rows = torch.tensor([prompt for prompt in range(len(prompts)) for _ in range(2 + prompt)])
    if order == "mixed":
        rows = rows[torch.randperm(len(rows), generator=generator)]
    cache.expand(rows)
    sequences = [prompts[row] for row in rows.tolist()]
    for step in range(6):
        if step == 3:
            kept = torch.arange(len(rows))[rows > 0][::2]
            cache.keep(kept)
            sequences = [sequences[row] for row in kept.tolist()]
        drawn = torch.randint(0, VOCAB, (len(sequences), 1), generator=generator)
        sequences = [torch.cat([sequence, new]) for sequence, new in zip(sequences, drawn, strict=True)]
        logits = last_logits(model, drawn, cache=cache)
        expected = torch.cat([last_logits(model, sequence[None]) for sequence in sequences])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def read(model, sequences, repeats, length):
    """Return a cache of sequences that have been read, with several continuations each, and the continuations."""
    longest = max(map(len, sequences))
    padding = torch.tensor([longest - len(sequence) for sequence in sequences])
    cache = model.new_cache(length or longest, padding if padding.any() else None)
    padded = [torch.nn.functional.pad(s, (longest - len(s), 0)) for s in sequences]
    last_logits(model, torch.stack(padded), cache=cache)
    rows = torch.tensor([row for row in range(len(sequences)) for _ in range(repeats)])
    if repeats > 1:
        cache.expand(rows)
    return cache, [sequences[row] for row in rows.tolist()]


@torch.no_grad()
@pytest.mark.parametrize("repeats", [1, 2])
def test_merged_caches_match_separate_sequences(model, repeats):
    """Shorter and longer prompts join, long sequences leave, and columns that are padding for all are dropped."""
    generator = torch.Generator().manual_seed(repeats)

    def draw(*shape):
        return torch.randint(0, VOCAB, shape, generator=generator)

    cache, sequences = read(model, [draw(8), draw(3)], repeats, 12)
    kept = {2: slice(None, None, 2), 4: slice(repeats, None), 7: slice(-3, None)}
    joining = {1: (2, 9), 2: (1, 4), 4: (5,), 5: (1, 17)}
    for step in range(10):
        if step in kept:
            rows = torch.arange(len(sequences))[kept[step]]
            cache.keep(rows)
            sequences = [sequences[row] for row in rows.tolist()]
        drawn = draw(len(sequences), 1)
        sequences = [torch.cat([sequence, new]) for sequence, new in zip(sequences, drawn, strict=True)]
        logits = last_logits(model, drawn, cache=cache)
        expected = torch.cat([last_logits(model, sequence[None]) for sequence in sequences])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        if step in joining:
            newcomers, new = read(model, [draw(length) for length in joining[step]], repeats, None)
            cache.merge(newcomers, CONTEXT)
            sequences += new
            assert cache.can_merge
            assert cache.length == CONTEXT
    assert cache.filled == max(map(len, sequences))


@torch.no_grad()
def test_prompts_are_stored_once_in_float32_and_copied_in_half_precision():
    model, rows = transformer().eval(), torch.tensor([0] * 5 + [1] * 5)
    for is_half in (False, True):
        cache = model.new_cache(8)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            last_logits(model, torch.randint(0, VOCAB, (2, 6)), cache=cache)
            cache.expand(rows)
            last_logits(model, torch.randint(0, VOCAB, (10, 1)), cache=cache)
        assert (cache.shared is None) == is_half
        rows_and_columns = cache.layers[0]._keys.shape[0], cache.layers[0]._keys.shape[2]
        assert rows_and_columns == (10, 8 if is_half else 2)
