"""SFT and DPO beside TRL's trainers: same model, pairs, order, optimizer and number of steps, on a CPU.

    python -m pip install trl  # no dependency of foundry's
    python benchmarks/finetuning_trl.py [--steps 50]

Prints for each method the largest difference of the losses of a step, and tokens per second without padding of both.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from foundry import compose
from foundry.data.arithmetic import Sum
from foundry.data.order import GlobalOrder
from foundry.parts import build_data
from foundry.train import train

BATCH, LR, BETA, SEQ_LEN = 16, 1e-3, 0.1, 160
SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def rows(count: int) -> list[dict[str, str]]:
    """Sums of ragged lengths with a right and a wrong answer."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        low = (10, 100)[int(torch.randint(2, (), generator=generator))]
        a, b = torch.randint(low, 10 * low, (2,), generator=generator).tolist()
        one = Sum(a, b)
        rejected = one.worked(number % (len(str(a)) - 1))
        found.append({"prompt": one.question, "chosen": one.worked(), "rejected": rejected, "completion": one.worked()})
    return found


def foundry_run(folder: Path, method: str, steps: int) -> tuple[list[float], float, list[int]]:
    """Losses, useful tokens per second after the first steps, and the rows in the order in which they were read."""
    data = {"sft": "chats", "dpo": "preferences"}[method]
    own = [f"objective.ref_policy_kl_penalty={BETA}"] if method == "dpo" else []
    config = compose(
        [
            "model=base",
            f"model.path={folder / 'base'}",
            f"data={data}",
            f"data.path={folder / 'rows.jsonl'}",
            f"data.validation_path={folder / 'valid.jsonl'}",
            f"data.cache_dir={folder / 'cache'}",
            f"data.seq_len={SEQ_LEN}",
            f"objective={method}",
            *own,
            "optimizer=adamw",
            "optimizer.weight_decay=0",
            "optimizer.beta2=0.999",
            "scheduler=constant",
            "scheduler.warmup=0",
            f"hparams.lr={LR}",
            f"hparams.max_steps={steps}",
            f"hparams.global_batch_size={BATCH}",
            f"hparams.per_gpu_batch_size={BATCH}",
            "hparams.grad_clip_norm=1.0",
            "precision=fp32",
            "tracking=none",
            "tracking.progress=false",
            "tracking.log_every_n_steps=1",
            "evaluation.interval=null",
            "evaluation.max_samples=1",
            "evaluation.write_samples=false",
            "checkpoint=none",
        ]
    )
    run_dir = folder / method
    run_dir.mkdir()
    train(config, run_dir)
    lines = [line for line in map(json.loads, (run_dir / "metrics.jsonl").open()) if "loss" in line]
    splits = build_data(config)
    order = GlobalOrder(num_samples=len(splits.train), fingerprint=splits.fingerprint, seed=config.hparams.seed)
    seconds = sum(line["step_seconds"] for line in lines[2:])
    speed = (lines[-1]["tokens"] - lines[1]["tokens"]) / seconds
    return [line["loss"] for line in lines], speed, order.indices(range(steps * BATCH)).tolist()


def trl_run(
    folder: Path, method: str, steps: int, read: list[dict[str, str]], tokens: int
) -> tuple[list[float], float]:
    """Losses and useful tokens per second of TRL's trainer; `tokens` of all steps but the first two."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "base" / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    common: dict[str, Any] = {
        "output_dir": str(folder / f"trl_{method}"),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "max_length": SEQ_LEN,
    }
    names = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected")}[method]
    rendered = [{**row, "prompt": f"user: {row['prompt']}\nassistant: "} for row in read]
    dataset = Dataset.from_list([{name: row[name] for name in names} for row in rendered])
    kind, config = (
        (SFTTrainer, SFTConfig(**common)) if method == "sft" else (DPOTrainer, DPOConfig(beta=BETA, **common))
    )

    class InOrder(kind):  # type: ignore[misc, valid-type]
        """Rows as they come; the first two steps are not timed."""

        started = 0.0

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2:
                self.started = time.perf_counter()
            return super().training_step(*args, **kwargs)

    trainer = InOrder(model=model, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    seconds = time.perf_counter() - trainer.started
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], tokens / seconds


def make_base(folder: Path) -> None:
    """A model of transformers with its first weights, and a tokenizer of bytes."""
    from foundry.data.token_cache import train_with_end

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, **SIZES)
    tokenizer, end = train_with_end(["a"], 257)
    config.eos_token_id = end
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder / "base")


def main() -> None:
    """Compare both methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    for method in ("sft", "dpo"):
        with tempfile.TemporaryDirectory() as name:
            folder, made = Path(name), rows(steps * BATCH)
            make_base(folder)
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
            (folder / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[:2]))
            ours, speed, order = foundry_run(folder, method, steps)
            read = [made[index] for index in order]
            answers = ("completion",) if method == "sft" else ("chosen", "rejected")
            texts = [f"user: {row['prompt']}\nassistant: {row[name]}" for row in read[2 * BATCH :] for name in answers]
            theirs, other = trl_run(folder, method, steps, read, sum(map(len, texts)))
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"{method}: loss {ours[0]:.6f} to {ours[-1]:.6f}, TRL's {theirs[0]:.6f} to {theirs[-1]:.6f},")
        print(f"  largest difference {difference:.1e}; {speed:,.0f} tokens/s, TRL {other:,.0f}: {speed / other:.2f} x")


if __name__ == "__main__":
    main()
