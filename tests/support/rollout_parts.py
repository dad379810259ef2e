"""A tiny model, prompts and an environment for rollouts."""

import torch

from foundry.data.corpora.tokenizer import train_tokenizer
from foundry.data.splits import DataSplits, Prompt
from foundry.models.transformer import Transformer
from foundry.tasks.post_training.data.prompts import RowNumbers
from foundry.tasks.post_training.environments.judge import Judge
from foundry.tasks.post_training.objectives.distillation import Distillation
from foundry.tasks.post_training.objectives.grpo import GRPO
from foundry.tasks.post_training.rollouts.source import RolloutSource
from foundry.tasks.post_training.schemas.distillation import DistillationMode
from support.contexts import run_context

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
QUESTIONS = ["the dog", "a", "the cat runs", "dog", "cat cat", "runs a dog", "the", "a a"]
SETTINGS = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "generation_batch_size": 6, "max_new_tokens": 8}


class Vowels:
    """Score `vowels`: fraction of vowels in the answer."""

    def score(self, answers):
        texts = [answer.text for answer in answers]
        return [{"vowels": sum(c in "aeiou" for c in text) / max(1, len(text))} for text in texts]


VOWELS = Judge(Vowels(), weights={"vowels": 2.0}, name="Vowels")


def make_model(seed=3):
    torch.manual_seed(seed)
    return Transformer(vocab_size=280, max_seq_len=32, init_std=0.3, **SIZES)


def make_data():
    tokenizer = train_tokenizer(["the dog runs", "a cat"] * 9, 280)
    prompts = [Prompt(tuple(tokenizer.encode(text).ids), None, row, {}) for row, text in enumerate(QUESTIONS)]
    return DataSplits(
        train=RowNumbers(len(prompts)),
        validation=RowNumbers(0),
        fingerprint="questions",
        tokenizer=tokenizer,
        train_prompts=prompts,
        stop_ids=(0, *range(270, 280)),
        tokens_per_sample=12,
    )


def make_source(
    objective, model, *, world=None, judge=VOWELS, data=None, frozen=(), per_gpu_batch_size=4, pack_tokens=None
):
    data = make_data() if data is None else data
    run = run_context(world=world, data=data, judge=judge, seed=5, per_gpu_batch_size=per_gpu_batch_size)
    return RolloutSource(objective, model, run, frozen=frozen, pack_tokens=pack_tokens)


def make_student(teacher, **settings):
    """Return an on-policy distillation objective."""
    defaults = {"teacher": "teacher", "vocab_size": 280, "max_seq_len": 32, "mode": DistillationMode.on_policy}
    objective = Distillation(**{**defaults, **SETTINGS, **settings})
    objective.compare({"teacher": teacher.requires_grad_(False).eval()})
    return objective


def make_objective(reference=None, **settings):
    objective = GRPO(**{**SETTINGS, **settings})
    objective.compare({} if reference is None else {"reference": reference.requires_grad_(False).eval()})
    return objective
