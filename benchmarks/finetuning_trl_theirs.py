"""TRL's side of finetuning_trl.py: its trainers, given foundry's samples in foundry's order.

python benchmarks/finetuning_trl_theirs.py JOB.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from meter import Meter
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from foundry.environments.matching import Arithmetic
from foundry.environments.protocol import Answer


class Measured(TrainerCallback):
    """Notes every step; `tokens` of a step are known beforehand, or are what has been generated for it."""

    def __init__(self, tokens: list[int] | None) -> None:
        self.meter, self.rewards, self._tokens = Meter(), list[float](), tokens
        self._generated = 0

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float]:
        """A reward function of GRPOTrainer: foundry's environment."""
        asked = zip(completions, prompts, answer, strict=True)
        scores = Arithmetic().score([Answer(text, prompt, {"answer": right}, False) for text, prompt, right in asked])
        rewards = [float(one["correct"] or 0) for one in scores]
        self.rewards.append(sum(rewards) / len(rewards))
        self._generated = sum(map(len, completion_ids))
        return rewards

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step(self._generated if self._tokens is None else self._tokens[state.global_step - 1])


def settings(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the three trainers are told alike."""
    return {
        "output_dir": str(folder / "out"),
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["per_gpu_batch_size"],
        "gradient_accumulation_steps": job["batch_size"] // job["per_gpu_batch_size"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "seed": job["seed"],
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def in_order(kind: Any) -> Any:
    """A trainer that reads its rows as they come."""

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def build(job: dict[str, Any], folder: Path, rows: list[dict[str, Any]]) -> tuple[Any, Measured]:
    """The trainer of the method, and what measures it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        "processing_class": tokenizer,
    }
    told, method, batch = settings(job, folder), job["method"], job["batch_size"]
    if method == "grpo":
        measured = Measured(None)
        assert [len(tokenizer(row["prompt"])["input_ids"]) for row in rows] == [row["tokens"] for row in rows]
        filters = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_length": job["max_new_tokens"]}
        args = GRPOConfig(
            num_generations=job["num_generations"], beta=job["beta"], shuffle_dataset=False, **filters, **told
        )
        trainer = GRPOTrainer(reward_funcs=measured.reward, args=args, train_dataset=Dataset.from_list(rows), **common)
    elif method == "sft":
        measured = Measured(_by_step([len(row["input_ids"]) - 1 for row in rows], batch))
        args = SFTConfig(completion_only_loss=True, max_length=None, **told)
        trainer = in_order(SFTTrainer)(args=args, train_dataset=Dataset.from_list(rows), **common)
    else:
        lengths = [len(row["prompt"] + row[name]) for row in rows for name in ("chosen", "rejected")]
        measured = Measured(_by_step(lengths, 2 * batch))
        args = DPOConfig(beta=job["beta"], max_length=None, **told)
        trainer = in_order(DPOTrainer)(args=args, train_dataset=Dataset.from_list(rows), **common)
    trainer.add_callback(measured)
    return trainer, measured


def _by_step(lengths: list[int], size: int) -> list[int]:
    return [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def main() -> None:
    """Run one job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    trainer, measured = build(job, folder, json.loads(Path(job["order"]).read_text()))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    measured.meter.write(folder / "measured.json", job["num_warmup"], losses=losses, rewards=measured.rewards)


if __name__ == "__main__":
    main()
