"""Settings of one config group that reach the parts of another."""

import pytest
import torch
from support.composition import configure
from support.tiny import SMALL_LM
from torch.utils._python_dispatch import TorchDispatchMode

from foundry.parts.data import build_data
from foundry.parts.model import build_model

SUMS = [*(word for word in SMALL_LM if not word.startswith("data.")), "data=arithmetic", "data.num_rows=16"]
PROMPTS = [
    *SUMS,
    "data.form=prompts",
    "objective=grpo",
    "objective.max_new_tokens=8",
    "objective.num_generations_per_prompt=8",
    "environment=arithmetic",
    "evaluation=reward",
]


@pytest.fixture(autouse=True)
def _cache(cache, monkeypatch):
    monkeypatch.setenv("FOUNDRY_CACHE", str(cache))


def test_data_is_built_from_the_seed_of_the_run():
    questions = [
        [prompt.tokens for prompt in build_data(configure(*PROMPTS, f"hparams.seed={seed}")).train_prompts]
        for seed in (7, 7, 8)
    ]
    assert questions[0] == questions[1] != questions[2]


class Logits(TorchDispatchMode):
    """Records the number of rows of products whose last dimension is the vocabulary."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.rows = vocab_size, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.mm.default and output.shape[-1] == self.vocab_size:
            self.rows.append(len(output))
        return output


@pytest.mark.parametrize(("chunk", "tiles"), [("null", [64]), ("48", [48, 16]), ("16", [16] * 4)])
def test_log_probs_of_a_policy_are_computed_in_chunks(chunk, tiles):
    config = configure(*PROMPTS, f"objective.logprob_chunk_size={chunk}")
    model, tokens = build_model(config), torch.arange(64).view(2, 32)
    with torch.no_grad(), Logits(config.model.vocab_size) as logits:
        model(tokens, tokens)
    assert logits.rows == tiles
