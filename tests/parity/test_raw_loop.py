"""A run of foundry, step by step, against a loop in plain PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.examples import long_case, some_of

from foundry.data.order import GlobalOrder
from foundry.engine.train import train
from foundry.parts.data import build_data
from foundry.parts.model import build_model
from foundry.tracking.metrics_file import read_metrics

STEPS, WARMUP, LR, FLOOR, BATCH = 50, 5, 3e-3, 1e-4, 16
MAX_NORM = 0.25  # Below the first gradient norms of each task.
SEED = 7  # Not the default seed.


def raw_loop(config, loss_of):
    """Train with AdamW, linear warmup, cosine decay and clipping; return losses, gradient norms and the model."""
    data, model = build_data(config), build_model(config)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    order = GlobalOrder(num_samples=len(data.train), fingerprint=data.fingerprint, seed=SEED)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        positions = range((step - 1) * BATCH, step * BATCH)
        items = [data.train[int(index)] for index in order.indices(positions)]
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        lr = LR * step / WARMUP
        if step > WARMUP:
            lr = FLOOR + 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) * (LR - FLOOR)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(model, batch, positions)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, model


def language_model_loss(model, batch, positions):
    logits = model(batch["tokens"], return_logits=True).logits.float()
    valid = batch["targets"] != -100
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    return cross_entropy + 1e-3 * (logits.logsumexp(-1)[valid] ** 2).mean()


def diffusion_loss(model, batch, positions):
    from diffusers import DDPMScheduler

    from foundry.core.keyed_random import keyed_integers, keyed_normal, keyed_uniform

    where = torch.tensor(positions)
    noise = keyed_normal(SEED, where, (1, 8, 8), stream="noise", device="cpu")
    timesteps = keyed_integers(SEED, where, 1000, stream="timestep", device="cpu")
    dropped = keyed_uniform(SEED, where, stream="condition") < 0.1
    schedule = DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2", rescale_betas_zero_snr=True)
    alpha = schedule.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    noisy = alpha.sqrt() * batch["images"] + (1 - alpha).sqrt() * noise
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * batch["images"]
    predicted = model(noisy, timesteps, torch.where(dropped, 10, batch["labels"]))
    return ((predicted - velocity) ** 2).mean()


def policy_loss(model, batch, positions):
    from diffusers import DDPMScheduler

    from foundry.core.keyed_random import keyed_integers, keyed_normal

    where, valid = torch.tensor(positions), ~batch["is_padded"]
    actions = batch["actions"].nan_to_num()
    noise = keyed_normal(SEED, where, tuple(actions.shape[1:]), stream="noise")
    timesteps = keyed_integers(SEED, where, 100, stream="timestep")
    alpha = DDPMScheduler(100, beta_schedule="squaredcos_cap_v2").alphas_cumprod[timesteps].view(-1, 1, 1)
    predicted = model(alpha.sqrt() * actions + (1 - alpha).sqrt() * noise, timesteps.float(), batch["state"])
    return (predicted - actions)[valid].square().mean()


@pytest.mark.parametrize(
    ("task", "loss_of"), [("lm", language_model_loss), long_case("diffusion", diffusion_loss), ("policy", policy_loss)]
)
@pytest.mark.parametrize("per_gpu_batch_size", some_of([16, 4], 4))
def test_fifty_steps_match_a_plain_pytorch_loop(configure, tmp_path, task, loss_of, per_gpu_batch_size):
    config = configure(
        task,
        f"hparams.max_steps={STEPS}",
        f"hparams.per_gpu_batch_size={per_gpu_batch_size}",
        f"hparams.lr={LR}",
        f"hparams.seed={SEED}",
        f"hparams.grad_clip_norm={MAX_NORM}",
        "scheduler=cosine",
        f"scheduler.warmup={WARMUP}",
        f"scheduler.min_lr={FLOOR}",
        "checkpoint.save_final=false",
    )
    losses, norms, _ = raw_loop(config, loss_of)
    train(config, tmp_path)
    logged = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in logged] == pytest.approx(losses, abs=1e-6)
    assert [line["grad_norm"] for line in logged] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0]
    assert sum(norm > MAX_NORM for norm in norms) >= 5
