"""TRL's side of finetuning_trl.py: its trainers, with foundry's samples in foundry's order.

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

from foundry.generation.scoring import Answer
from foundry.tasks.post_training.environments.matching import Arithmetic


class Measured(TrainerCallback):
    """Callback that times every step and counts useful tokens.

    Args:
        tokens: useful tokens of the whole run; 0 if the run generates them.
    """

    def __init__(self, tokens: int) -> None:
        self.meter, self.rewards, self._uncounted = Meter(), list[float](), tokens

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, answer: Any, **columns: Any) -> list[float]:
        """Reward function for GRPOTrainer, which calls foundry's environment."""
        items = zip(completions, prompts, answer, strict=True)
        scores = Arithmetic().score([Answer(text, prompt, {"answer": right}, False) for text, prompt, right in items])
        rewards = [float(score["correct"] or 0) for score in scores]
        self.rewards.append(sum(rewards) / len(rewards))
        self._uncounted = sum(map(len, completion_ids))
        return rewards

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.meter.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.step(self._uncounted)
        self._uncounted = 0


def settings(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a trainer; settings of the side take precedence."""
    common = {
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
    return {**common, **job["trl"]}


def in_order(kind: Any, meter: Meter) -> Any:
    """Return a subclass of a trainer that reads the dataset's rows in order, unless its settings group rows by length.

    Args:
        kind: class of the trainer.
        meter: times the pass of the reference model, if there is one.
    """

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if self.args.train_sampling_strategy == "group_by_length":
                return super()._get_train_sampler(*args, **kwargs)
            return SequentialSampler(self.train_dataset)

        def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
            with meter.preparing():
                return super()._precompute_ref_logps(*args, **kwargs)

    return InOrder


def build(job: dict[str, Any], folder: Path, rows: list[dict[str, Any]]) -> tuple[Any, Measured]:
    """Build the trainer of the method and the callback that measures it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        "processing_class": tokenizer,
    }
    options, method = settings(job, folder), job["method"]
    if method == "grpo":
        measured = Measured(0)
        assert [len(tokenizer(row["prompt"])["input_ids"]) for row in rows] == [row["tokens"] for row in rows]
        filters = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_length": job["max_new_tokens"]}
        args = GRPOConfig(
            num_generations=job["num_generations"], beta=job["beta"], shuffle_dataset=False, **filters, **options
        )
        trainer = GRPOTrainer(reward_funcs=measured.reward, args=args, train_dataset=Dataset.from_list(rows), **common)
    elif method == "sft":
        measured = Measured(sum(len(row["input_ids"]) - 1 for row in rows))
        args = SFTConfig(completion_only_loss=True, **{"max_length": None, **options})
        trainer = in_order(SFTTrainer, measured.meter)(args=args, train_dataset=Dataset.from_list(rows), **common)
    else:
        measured = Measured(sum(len(row["prompt"] + row[name]) for row in rows for name in ("chosen", "rejected")))
        args = DPOConfig(beta=job["beta"], max_length=None, **options)
        trainer = in_order(DPOTrainer, measured.meter)(args=args, train_dataset=Dataset.from_list(rows), **common)
    trainer.add_callback(measured)
    return trainer, measured


def main() -> None:
    """Run one job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    trainer, measured = build(job, folder, json.loads(Path(job["order"]).read_text()))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    measured.meter.write(folder / "measured.json", 0, losses=losses, rewards=measured.rewards)


if __name__ == "__main__":
    main()
