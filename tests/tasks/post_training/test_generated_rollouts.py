"""Planned bytes of the key-value cache of rollouts match a filled cache."""

import torch
from support.rollout_parts import SIZES, make_model, make_objective

from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer
from foundry.tasks.post_training.rollouts.cache_size import cache_bytes


def test_planned_cache_bytes_match_a_filled_cache():
    model, settings = make_model(), make_objective(ref_policy_kl_penalty=0.0).rollouts
    cache = model.new_cache(20)
    model(torch.zeros(settings.generation_batch_size, 2, dtype=torch.int64), return_logits=True, cache=cache)
    kept = [tensor for layer in cache.layers for tensor in (layer._keys, layer._values)]
    assert cache_bytes(model, settings, 20, 4) == sum(tensor.nbytes for tensor in kept)
    without_config = Transformer(vocab_size=280, max_seq_len=32, residual_scalars=True, **SIZES)
    assert cache_bytes(without_config, settings, 20, 4) == cache_bytes(model, settings, 20, 4)


def test_cache_bytes_of_transformers_models_and_of_unknown_models():
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"path": None, "architecture": "llama", "vocab_size": 280, "max_seq_len": 32}
    model = HuggingFaceCausalLM(**own, config={**config, "num_key_value_heads": 2})
    settings = make_objective(ref_policy_kl_penalty=0.0).rollouts
    assert cache_bytes(model, settings, 20, 4) == cache_bytes(make_model(), settings, 20, 4)
    assert cache_bytes(torch.nn.Linear(2, 2), settings, 20, 4) is None
