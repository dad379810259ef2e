"""Supervised fine-tuning beside TRL's SFTTrainer: the same weights, rows, order and optimizer, step by step.

Rows are of very different lengths. TRL's trainer is given foundry's tokens in foundry's order; foundry's parts run in a
bare loop. Printed are useful tokens (without padding) per second of one core, the first steps left out, and by how much
the losses of any step differ from TRL's at most. Needs TRL, which foundry does not: pip install trl.

    python benchmarks/trl_sft.py [--steps 50] [--per-gpu-batch-size 8]
"""

import argparse
import json
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foundry import compose
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.models.transformer import Transformer
from foundry.parts import build_data, build_model, build_objective, build_optimizers, resolve_packing
from foundry.training.step import set_schedule

BATCH, LR, WARM = 32, 1e-3, 3
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


def write_rows(path: Path, count: int) -> None:
    """Conversations whose lengths are log-normal: half of them below 65 tokens, a few above 350."""
    generator = random.Random(0)
    with path.open("w") as stream:
        for number in range(count):
            length = min(400, max(4, int(generator.lognormvariate(3.6, 1.0))))
            words = " ".join(str(generator.randrange(100)) for _ in range(length // 3 + 1))
            stream.write(json.dumps({"prompt": f"Count to {number}", "completion": words[:length]}) + "\n")


class OwnClock:
    """Useful tokens per second of CPU time, the first few steps left out."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self._begin, self._steps = 0, 0.0, time.process_time(), 0

    def step(self, tokens: int) -> None:
        now = time.process_time()
        self._steps += 1
        if self._steps > WARM:
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + now - self._begin
        self._begin = now

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def run_foundry(config, folder: Path, steps: int) -> tuple[list[float], float]:
    """Loss of each step, and useful tokens per second."""
    data, objective, model = build_data(config), build_objective(config), build_model(config)
    if isinstance(model, Transformer):
        model.load_state_dict(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    (optimizer,) = build_optimizers(config, model)
    loader = Loader(
        dataset=data.train,
        order=GlobalOrder(num_samples=len(data.train), fingerprint=data.fingerprint, seed=config.hparams.seed),
        batch_size_at=lambda samples: BATCH,
        per_gpu_batch_size=config.hparams.per_gpu_batch_size,
        pack_tokens=resolve_packing(config, model),
    )
    set_schedule([optimizer], LR)
    losses, clock = list[float](), OwnClock()
    for _ in range(steps):
        window = loader.next_window()
        count, total = sum(map(objective.num_valid, window.microbatches)), 0.0
        for microbatch in window.microbatches:
            loss = objective.loss(model, microbatch).loss / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        clock.step(window.num_tokens)
    return losses, clock.speed


def run_trl(config, folder: Path, steps: int) -> tuple[list[float], float]:
    """The same of TRL's trainer."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    data = build_data(config)
    order = GlobalOrder(num_samples=len(data.train), fingerprint=data.fingerprint, seed=config.hparams.seed)
    rows, lengths, examples = [], [], data.train
    for index in order.indices(range(steps * BATCH)).tolist():
        begin, end = examples.offsets[index : index + 2].tolist()
        tokens, trained = examples.tokens[begin:end].tolist(), examples.trained[begin:end].tolist()
        rows.append({"input_ids": tokens, "completion_mask": [int(value) for value in trained]})
        lengths.append(end - begin - 1)
    losses, clock = [0.0], OwnClock()
    per_gpu = config.hparams.per_gpu_batch_size

    class Trainer(SFTTrainer):
        seen = 0

        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses[-1] += loss.item()
            return loss

        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
            return self.optimizer

    from transformers import TrainerCallback

    class PerStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock.step(sum(lengths[(state.global_step - 1) * BATCH : state.global_step * BATCH]))
            losses.append(0.0)

    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=per_gpu,
        gradient_accumulation_steps=BATCH // per_gpu,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        completion_only_loss=True,
        max_length=None,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=data.tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        ),
        callbacks=[PerStep()],
    )
    trainer.train()
    return losses[:-1], clock.speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--per-gpu-batch-size", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder / "chats.jsonl", 1200)
        torch.manual_seed(0)
        llama = LlamaConfig(vocab_size=257, max_position_embeddings=512, num_key_value_heads=4, **SIZES)
        LlamaForCausalLM(llama).save_pretrained(folder)
        common = [
            "data=chats",
            f"data.path={folder / 'chats.jsonl'}",
            f"data.cache_dir={folder / 'cache'}",
            "data.seq_len=512",
            "data.vocab_size=257",
            "objective=sft",
            "optimizer=adamw",
            "optimizer.weight_decay=0",
            "precision=fp32",
            f"hparams.global_batch_size={BATCH}",
            f"hparams.per_gpu_batch_size={options.per_gpu_batch_size}",
        ]
        own = [
            "model.hidden_size=192",
            "model.intermediate_size=512",
            "model.rope_theta=10000.0",
            f"model.norm_eps={llama.rms_norm_eps}",
        ]
        kinds = {
            "foundry's decoder": own,
            "foundry's decoder, packed": [*own, "data.packing=true"],
            "foundry, model=hf": ["model=hf", f"model.path={folder}"],
            "foundry, model=hf, packed": ["model=hf", f"model.path={folder}", "data.packing=true"],
        }
        build_data(compose(common)).tokenizer.save(str(folder / "tokenizer.json"))
        common.append(f"data.tokenizer={folder / 'tokenizer.json'}")
        theirs, speed = run_trl(compose(common), folder, options.steps)
        versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
        print(f"{versions}; {options.steps} steps of {BATCH} rows, {options.per_gpu_batch_size} at a time")
        print(f"TRL: {speed:.0f} useful tokens/s, loss {theirs[0]:.6f} to {theirs[-1]:.6f}")
        for name, overrides in kinds.items():
            ours, own_speed = run_foundry(compose([*common, *overrides]), folder, options.steps)
            apart = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
            print(
                f"{name}: {own_speed:.0f} useful tokens/s, {own_speed / speed:.2f} x TRL; losses differ by {apart:.1e}"
            )


if __name__ == "__main__":
    main()
