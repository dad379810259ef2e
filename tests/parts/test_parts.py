"""Settings of one config group that reach the parts of another."""

import pytest
import torch
from support.composition import configure
from support.tiny import SMALL_LM
from torch.utils._python_dispatch import TorchDispatchMode

from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.parts.data import build_data
from foundry.parts.model import build_model
from foundry.parts.optimization import build_schedule

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


@pytest.mark.parametrize(
    ("words", "steps", "setting"),
    [
        ([], 1, "scheduler.min_lr above 0"),
        (["scheduler=linear"], 1, "scheduler.min_lr above 0"),
        (["scheduler.warmup=1", "scheduler.evaluate_at=start"], 1, "scheduler.evaluate_at=end"),
        (["scheduler.min_lr=1e-5"], 1, None),
        (["scheduler=constant"], 1, None),
        ([], 2, None),
    ],
)
def test_only_step_with_learning_rate_0_is_a_warning_with_a_remedy(words, steps, setting, caplog):
    config = configure("scheduler=cosine", "scheduler.warmup=0", "scheduler.min_lr=0", *words)
    budget = Budget(total_samples=8 * steps, batch_sizes=BatchSizes.constant(8), samples_per_epoch=80)
    schedule = build_schedule(config, budget)
    rates = [schedule.lr(8 * step, 8 * step + 8) for step in range(steps)]
    assert (max(rates) == 0) == (setting is not None)
    message = "scheduler: the only step of the run has learning rate 0, so no weights change; train longer, such as"
    expected = [] if setting is None else [f"{message} hparams.max_steps=2, or set {setting}"]
    assert [line for line in caplog.messages if "learning rate 0" in line] == expected
