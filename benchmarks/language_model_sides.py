"""One side of a comparison that trains a language model, in its own process; see language_model.py.

    python benchmarks/language_model_sides.py SIDE JOB.json

Every side trains a Llama with the same initial weights on the same rows in the same order. foundry trains its own
decoder, or the model of transformers (`foundry, model=hf`); the other sides train the model of transformers in their
usual way. All use the fused AdamW kernel, clip the gradient at 1.0, and read the loss of each step for the comparison.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from meter import Meter
from random_tokens import build_random_tokens
from torch import Tensor, nn

from foundry.data.order import GlobalOrder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": True}


class Notes:
    """Meter of a side, with the loss of each step."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.meter, self.losses = job, Meter(), list[float]()

    def start(self) -> None:
        """Start the clock before the first step."""
        self.meter.start()

    def step(self, loss: float) -> None:
        """Record a finished step; `loss` is the mean over all tokens of the step."""
        self.meter.step(self.job["batch_size"] * self.job["seq_len"])
        self.losses.append(loss)

    def write(self) -> None:
        """Write the measurements at the end."""
        self.meter.write(Path(self.job["measured"]), self.job["num_warmup"], losses=self.losses)


def read_rows(job: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return all samples of the run in foundry's order, as arguments of transformers' models with shifted labels."""
    count = job["steps"] * job["batch_size"]
    sizes = {"num_samples": count, "seq_len": job["seq_len"], "vocab_size": job["vocab_size"]}
    data = build_random_tokens(seed=job["seed"], **sizes)
    order = GlobalOrder(num_samples=count, fingerprint=data.fingerprint, seed=job["seed"])
    rows = data.train.rows[torch.from_numpy(order.indices(range(count)))]  # type: ignore[attr-defined]
    return [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in rows]


def read_microbatches(job: dict[str, Any]) -> Iterable[dict[str, Tensor]]:
    """Yield the samples, `per_gpu_batch_size` rows at a time."""
    return torch.utils.data.DataLoader(read_rows(job), batch_size=job["per_gpu_batch_size"])  # type: ignore[arg-type]


def write_weights(job: dict[str, Any]) -> None:
    """Initialize the weights of all sides and write them as a folder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(job["seed"])
    config = LlamaConfig(**job["config"], attention_bias=False, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(job["model"])
    Path(job["measured"]).write_text("{}")


def build_llama(job: dict[str, Any]) -> nn.Module:
    """Return the initial model of transformers on the device, checkpointed and compiled as the job requires."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).train().to(DEVICE)
    if job["checkpointing"] != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job["compile"]:
        for block in model.model.layers:
            block.compile()
    built: nn.Module = model
    return built


def summed_loss(model: nn.Module, microbatch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy summed over tokens, which transformers' models compute with `num_items_in_batch=1`."""
    loss: Tensor = model(**microbatch, labels=microbatch["shift_labels"], num_items_in_batch=1, use_cache=False).loss
    return loss


def train_raw(job: dict[str, Any], notes: Notes) -> None:
    """Train with a plain loop."""
    model, accumulated = build_llama(job), job["batch_size"] // job["per_gpu_batch_size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], **ADAMW)
    autocast: Callable[[], Any] = nullcontext
    if job["precision"] == "amp_bfloat16":
        autocast = lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16)  # noqa: E731
    notes.start()
    total, num_tokens = 0.0, job["batch_size"] * job["seq_len"]
    for index, microbatch in enumerate(read_microbatches(job), 1):
        with autocast():
            loss = summed_loss(model, {name: rows.to(DEVICE) for name, rows in microbatch.items()}) / num_tokens
        loss.backward()
        total += loss.item()
        if index % accumulated == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            notes.step(total)
            total = 0.0


def train_accelerate(job: dict[str, Any], notes: Notes) -> None:
    """Train with accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=DEVICE.type == "cpu",
        mixed_precision="bf16" if job["precision"] == "amp_bfloat16" else "no",
        gradient_accumulation_steps=job["batch_size"] // job["per_gpu_batch_size"],
    )
    model = build_llama(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], **ADAMW)
    model, optimizer, loader = accelerator.prepare(model, optimizer, read_microbatches(job))
    notes.start()
    total, num_tokens = 0.0, job["per_gpu_batch_size"] * job["seq_len"]  # accelerate also divides by the microbatches
    for microbatch in loader:
        with accelerator.accumulate(model):
            loss = summed_loss(model, microbatch) / num_tokens
            accelerator.backward(loss)
            total += loss.item() / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            notes.step(total)
            total = 0.0


def train_lightning(job: dict[str, Any], notes: Notes) -> None:
    """Train with Lightning's Trainer, with every optional feature off."""
    import lightning

    accumulated, num_tokens = job["batch_size"] // job["per_gpu_batch_size"], job["per_gpu_batch_size"] * job["seq_len"]

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.total = build_llama(job), 0.0

        def training_step(self, microbatch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = summed_loss(self.model, microbatch) / num_tokens  # Lightning also divides by `accumulated`
            self.total += loss.item() / accumulated
            return loss

        def on_train_start(self) -> None:
            notes.start()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % accumulated == 0:
                notes.step(self.total)
                self.total = 0.0

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # gradient_clip_val does not support the fused AdamW

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=job["lr"], **ADAMW)

    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if job["precision"] == "amp_bfloat16" else "32-true",
        max_steps=job["steps"],
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), read_microbatches(job))


def train_hf(job: dict[str, Any], notes: Notes) -> None:
    """Train with HF Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noting(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            notes.start()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                notes.step(float(logs["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        output_dir=str(Path(job["measured"]).parent / "trainer"),
        per_device_train_batch_size=job["per_gpu_batch_size"],
        gradient_accumulation_steps=job["batch_size"] // job["per_gpu_batch_size"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        bf16=job["precision"] == "amp_bfloat16",
        use_cpu=DEVICE.type == "cpu",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    rows = [{**row, "labels": row["shift_labels"]} for row in read_rows(job)]
    InOrder(build_llama(job), arguments, train_dataset=rows, callbacks=[Noting()]).train()


def train_foundry(job: dict[str, Any], notes: Notes) -> None:
    """Train with `run()` of a composed configuration."""
    from foundry import compose, run

    class Noting:
        def on_start(self, event: Any) -> None:
            notes.start()

        def on_step(self, event: Any) -> None:
            notes.step(event.loss)

        def on_evaluation(self, event: Any) -> None:
            """Do nothing: only training is measured."""

        def on_end(self, event: Any) -> None:
            """Do nothing."""

    with tempfile.TemporaryDirectory() as options:
        data = {"_target_": "random_tokens.build_random_tokens", "num_samples": job["steps"] * job["batch_size"]}
        data |= {"seq_len": job["seq_len"], "vocab_size": job["vocab_size"]}
        Path(options, "data").mkdir()
        Path(options, "data", "random.yaml").write_text(json.dumps(data))
        config = compose(["data=random", *job["overrides"]], config_dir=options)
        run(config, Path(job["measured"]).parent / "run", observers=[Noting()])


SIDES: dict[str, Callable[[dict[str, Any], Notes], None]] = {
    "raw": train_raw,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "hf": train_hf,
    "foundry": train_foundry,
}


def main() -> None:
    """Run one side."""
    side, file = sys.argv[1:]
    job = json.loads(Path(file).read_text())
    if side == "weights":
        write_weights(job)
        return
    if job["attention"] != "any":
        for kernel in ("math", "mem_efficient", "flash", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == job["attention"])
    notes = Notes(job)
    SIDES[side](job, notes)
    notes.write()


if __name__ == "__main__":
    main()
