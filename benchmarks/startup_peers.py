"""One optimizer step of a small language model with another library, for `benchmarks/startup.py`.

    python benchmarks/startup_peers.py raw|hf|lightning|accelerate FILE

FILE is written after the step. Only modules that the selected library needs are imported.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, SEQ_LEN, BATCH, LR = 8192, 32, 64, 2, 2, 32, 8, 1e-3


class Model(nn.Module):
    """Decoder with the sizes of foundry's run; its output has the format of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.size(1))
        logits = self.head(self.layers(self.embedding(input_ids), mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def samples() -> list[dict[str, Tensor]]:
    """Return random tokens, one sample per row."""
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def batches() -> Any:
    """Return one batch of the samples."""
    return torch.utils.data.DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]


def raw() -> None:
    """Train with a plain loop."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for batch in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def trainer() -> None:
    """Train with HF Trainer."""
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": True}
    arguments = TrainingArguments(
        "trainer", max_steps=1, per_device_train_batch_size=BATCH, learning_rate=LR, use_cpu=True, **options
    )
    Trainer(model=Model(), args=arguments, train_dataset=samples()).train()


def lightning() -> None:
    """Train with Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    off: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    lightning.Trainer(max_steps=1, accelerator="cpu", precision="bf16-mixed", gradient_clip_val=1.0, **off).fit(
        Module(), batches()
    )


def accelerate() -> None:
    """Train with a loop that uses accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR), batches())
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    {"raw": raw, "hf": trainer, "lightning": lightning, "accelerate": accelerate}[sys.argv[1]]()
    Path(sys.argv[2]).write_text("stepped\n")
