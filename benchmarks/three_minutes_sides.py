"""One run of three_minutes.py in its own process: train for a number of steps, then measure the held-out loss.

    python benchmarks/three_minutes_sides.py SIDE JOB.json

foundry trains the configuration of the job. HF Trainer and Lightning train a Llama of transformers with the sizes of
foundry's decoder, with AdamW, the same batch size, precision, clipping and warm-up, and a linear decay to zero. nanoGPT
runs its own train.py. The side `prepare` writes foundry's tokens for these sides, which do not import foundry.
"""

import json
import os
import pickle
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Job = dict[str, Any]
Measured = dict[str, Any]
SummedLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens and targets, (rows, length) int64 each, to the cross-entropy in nats summed over all targets."""
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
CLIP, WARMUP = 1.0, 0.05
NANOGPT_CPU = (
    "config/train_shakespeare_char.py",
    *("--device=cpu", "--compile=False", "--eval_iters=1", "--log_interval=1", "--dropout=0.0"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
)
"""CPU command of nanoGPT's README, with evaluations of one batch, without its lengths and its dataset."""


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of foundry's tokens as arguments of transformers' models, with labels that are already shifted.

    Args:
        job: content of the job file.
        split: train or val.
    """

    def __init__(self, job: Job, split: str) -> None:
        self._tokens = np.fromfile(Path(job["data"], f"{split}.bin"), np.uint16)
        self._length = int(job["prepared"]["seq_len"])

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._tokens[index * self._length : (index + 1) * self._length + 1]
        row = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}


def compose_job(job: Job) -> Any:
    """Compose the configuration of foundry's side."""
    from foundry import compose

    return compose(
        [
            *("tracking=none", "tracking.progress=false", "tracking.log_every_n_steps=1", "checkpoint=none"),
            *("evaluation.interval=null", "evaluation.write_samples=false"),
            *([f"evaluation.max_samples={job['evaluated_rows']}"] if job["evaluated_rows"] else []),
            *job["overrides"],
            f"hparams.max_steps={job['steps']}",
            f"hparams.seed={job['seed']}",
        ]
    )


def prepare(job: Job) -> Measured:
    """Write the tokens of foundry's data in nanoGPT's format.

    Returns:
        The sizes of foundry's decoder and rows, the number of held-out targets, and the bytes of their text.
    """
    from foundry.parts.data import build_data

    config, folder = compose_job(job), Path(job["data"])
    data, model = build_data(config), config.model
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("train", data.train), ("val", data.validation)):
        split.tokens.astype(np.uint16).tofile(folder / f"{name}.bin")  # type: ignore[attr-defined]
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": model.vocab_size}))
    targets = data.validation.batch(range(len(data.validation)))["targets"].flatten()
    # Each character of a token of a byte-level BPE stands for one byte; the end of a document is no text.
    words = [data.tokenizer.id_to_token(token) for token in range(data.tokenizer.get_vocab_size())]
    lengths = torch.tensor([0 if token in data.stop_ids else len(word) for token, word in enumerate(words)])
    return {
        "tokens": len(targets),
        "bytes": int(lengths[targets].sum()),
        "seq_len": config.data.seq_len,
        "batch_size": config.hparams.global_batch_size,
        "bf16": config.precision.mode.name == "amp_bfloat16",
        "llama": {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "max_position_embeddings": model.max_seq_len,
            "tie_word_embeddings": model.tie_embeddings,
        },
    }


def train_foundry(job: Job) -> Measured:
    """Train with `run()`; its final evaluation is the held-out loss."""
    from foundry import run

    result: Measured = {}

    class Watch:
        def on_start(self, event: Any) -> None:
            """Do nothing: only the end of training and its evaluation are read."""

        def on_step(self, event: Any) -> None:
            result.update(ended=time.time(), tokens=event.tokens)

        def on_evaluation(self, event: Any) -> None:
            result["loss"] = event.metrics["val_loss"]

        def on_end(self, event: Any) -> None:
            """Do nothing."""

    run(compose_job(job), Path(job["measured"]).parent / "run", observers=[Watch()])
    return result


def build_llama(job: Job) -> Any:
    """Return an untrained Llama of transformers with the weights of the job's seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(job["seed"])
    return LlamaForCausalLM(LlamaConfig(**job["prepared"]["llama"]))


def measure_llama(job: Job, model: Any) -> Measured:
    """Return the measurements of a Llama whose training has just ended."""
    ended, prepared = time.time(), job["prepared"]
    model.eval()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=prepared["bf16"]):
            total: Tensor = model(tokens, labels=targets, shift_labels=targets, num_items_in_batch=1).loss
        return total

    tokens = job["steps"] * prepared["batch_size"] * prepared["seq_len"]
    return {"ended": ended, "tokens": tokens, "loss": held_out_loss(loss, job, prepared["seq_len"])}


def held_out_loss(loss: SummedLoss, job: Job, window: int) -> float:
    """Return the cross-entropy in nats per token of the validation split, or of the first `evaluated_rows` of it.

    Args:
        loss: loss of the trained model.
        job: content of the job file.
        window: longest context of the model in tokens, a divisor of the row length.
    """
    rows, length = Rows(job, "val"), int(job["prepared"]["seq_len"])
    count = min(job["evaluated_rows"] or len(rows), len(rows))
    total = 0.0
    with torch.inference_mode():
        for index in range(count):
            row = rows[index]
            total += float(loss(row["input_ids"].view(-1, window), row["labels"].view(-1, window)))
    return total / (count * length)


def train_hf(job: Job) -> Measured:
    """Train with HF Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(Path(job["measured"]).parent / "trainer"),
        per_device_train_batch_size=job["prepared"]["batch_size"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="linear",
        warmup_steps=round(WARMUP * job["steps"]),
        optim="adamw_torch_fused",
        adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=CLIP,
        bf16=job["prepared"]["bf16"],
        use_cpu=True,
        seed=job["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = build_llama(job)
    Trainer(model, arguments, train_dataset=Rows(job, "train")).train()
    return measure_llama(job, model)


def train_lightning(job: Job) -> Measured:
    """Train with Lightning's Trainer."""
    import lightning
    from transformers import get_linear_schedule_with_warmup

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = build_llama(job)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)  # gradient_clip_val does not support the fused AdamW

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=job["lr"], **ADAMW)
            num_warmup = round(WARMUP * job["steps"])
            schedule = get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]
                optimizer, num_warmup, job["steps"]
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if job["prepared"]["bf16"] else "32-true",
        max_steps=job["steps"],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    rows = torch.utils.data.DataLoader(Rows(job, "train"), job["prepared"]["batch_size"], shuffle=True, drop_last=True)
    trainer.fit(module, rows)
    return measure_llama(job, module.model)


def train_nanogpt(job: Job) -> Measured:
    """Run nanoGPT's train.py with its CPU recipe, with the seed of the job instead of its constant."""
    steps, out_dir = job["steps"], Path(job["measured"]).parent / "out"
    lengths = [f"--max_iters={steps - 1}", f"--lr_decay_iters={steps}", f"--eval_interval={steps}"]
    os.chdir(job["nanogpt"])
    sys.path.insert(0, job["nanogpt"])
    sys.argv = ["train.py", *NANOGPT_CPU, f"--dataset={job['data']}", f"--out_dir={out_dir}", *lengths]
    set_seed, torch.manual_seed = torch.manual_seed, lambda seed: set_seed(job["seed"])
    names = runpy.run_path("train.py", run_name="__main__")
    ended, model = time.time(), names["raw_model"].eval()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = model(tokens, targets)[1] * targets.numel()
        return total

    return {
        "ended": ended,
        "tokens": steps * names["tokens_per_iter"],
        "loss": held_out_loss(loss, job, names["block_size"]),
    }


SIDES: dict[str, Callable[[Job], Measured]] = {
    "prepare": prepare,
    "foundry": train_foundry,
    "hf": train_hf,
    "lightning": train_lightning,
    "nanogpt": train_nanogpt,
}


def main() -> None:
    """Run one side; `seconds` count from the start of this process, `begin` in the job, to the end of training."""
    side, file = sys.argv[1:]
    job = json.loads(Path(file).read_text())
    result = SIDES[side](job)
    if "ended" in result:
        result["seconds"] = result.pop("ended") - job["begin"]
    Path(job["measured"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
