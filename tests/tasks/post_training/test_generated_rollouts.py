"""Planned bytes of the key-value cache of rollouts match a filled cache."""

import weakref

import pytest
import torch
from support.rollout_parts import SIZES, make_data, make_model, make_objective

from foundry.generation.decoding import Decoding, generate
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer
from foundry.tasks.post_training.rollouts.cache_size import cache_bytes


def make_llama():
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"path": None, "architecture": "llama", "vocab_size": 280, "max_seq_len": 32}
    return HuggingFaceCausalLM(**own, config={**config, "num_key_value_heads": 2})


MODELS = {"transformer": make_model, "llama": make_llama}


def test_planned_cache_bytes_match_a_filled_cache():
    model, settings = make_model(), make_objective(ref_policy_kl_penalty=0.0).rollouts
    cache = model.new_cache(20)
    model(torch.zeros(settings.generation_batch_size, 2, dtype=torch.int64), return_logits=True, cache=cache)
    kept = [tensor for layer in cache.layers for tensor in (layer._keys, layer._values)]
    assert cache_bytes(model, settings, 20, 4) == sum(tensor.nbytes for tensor in kept)
    without_config = Transformer(vocab_size=280, max_seq_len=32, residual_scalars=True, **SIZES)
    assert cache_bytes(without_config, settings, 20, 4) == cache_bytes(model, settings, 20, 4)


def test_cache_bytes_of_transformers_models_and_of_unknown_models():
    model = make_llama()
    settings = make_objective(ref_policy_kl_penalty=0.0).rollouts
    assert cache_bytes(model, settings, 20, 4) == cache_bytes(make_model(), settings, 20, 4)
    assert cache_bytes(torch.nn.Linear(2, 2), settings, 20, 4) is None


def record_bytes(model, run):
    """Return the bytes of all caches after each forward pass of `run` and after each merge."""
    caches, found, new_cache = weakref.WeakSet(), [], model.new_cache

    def spy(*args):
        cache = new_cache(*args)
        merge = cache.merge

        def merge_and_measure(*args):
            merge(*args)
            measure()

        cache.merge = merge_and_measure
        caches.add(cache)
        return cache

    def measure(*_):
        layers = [layer for cache in caches for layer in getattr(cache, "layers", None) or cache.layers_cache.layers]
        values = [value for layer in layers for value in vars(layer).values()]
        tensors = [t for value in values for t in (value if isinstance(value, tuple) else (value,))]
        found.append(sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim() == 4))

    model.new_cache = spy
    handle = model.register_forward_hook(measure)
    run()
    handle.remove()
    return found


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("name", ["transformer", "llama"])
def test_planned_cache_bytes_are_an_upper_bound_while_prompts_enter(name, is_half):
    torch.manual_seed(4)
    model, settings = MODELS[name](), make_objective(ref_policy_kl_penalty=0.0, num_prompts_per_step=8).rollouts
    data = make_data()
    prompts = [prompt.tokens for prompt in data.train_prompts for _ in range(settings.num_generations_per_prompt)]
    stop_ids = frozenset(range(0, 280, 6))
    decoding = Decoding(max_new_tokens=settings.max_new_tokens, temperature=1.0, stop_ids=stop_ids)

    def run():
        size = settings.generation_batch_size
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            generate(model, prompts, decoding, context=32, device=torch.device("cpu"), batch_size=size)

    found = record_bytes(model, run)
    longest = max(map(len, prompts)) + settings.max_new_tokens
    planned = cache_bytes(model, settings, longest, 2 if is_half else 4)
    assert len(found) > 20
    assert planned / 3 < max(found) <= planned
