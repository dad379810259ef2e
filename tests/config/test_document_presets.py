"""Presets vla_foundry and megatron: the defaults in the documents of VLA Foundry and Megatron-Bridge."""

import pytest
from omegaconf import OmegaConf
from support.composition import compose, configure

from foundry.config.schemas.distributed import DDP
from foundry.config.schemas.optimizer import AdamW
from foundry.config.schemas.scheduler import WSD, Cosine, Linear
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.parts.optimization import build_schedule

VLA_FOUNDRY = {
    "precision": ("precision.mode", "amp_bfloat16"),
    "global_batch_size": ("hparams.global_batch_size", 512),
    "per_gpu_batch_size": ("hparams.per_gpu_batch_size", 8),
    "seed": ("hparams.seed", 42),
    "lr": ("hparams.lr", 1e-4),
    "lr_scheduler": ("scheduler._target_", Cosine._target_),
    "warmup": ("scheduler.warmup", "1000"),
    "lr_cooldown_end": ("scheduler.min_lr", 0.0),
    "force_min_lr": ("scheduler.force_min_lr", 0.0),
    "optimizer": ("optimizer._target_", AdamW._target_),
    "wd": ("optimizer.weight_decay", 0.01),
    "beta1": ("optimizer.beta1", 0.9),
    "beta2": ("optimizer.beta2", 0.95),
    "eps": ("optimizer.eps", 1e-8),
    "loss_function": ("hparams.loss_function", "cross_entropy"),
    "z_loss_coefficient": ("hparams.z_loss_coefficient", 0.0),
    "grad_clip_norm": ("hparams.grad_clip_norm", None),
    "grad_checkpointing": ("hparams.grad_checkpointing", False),
    "torchcompile": ("hparams.torchcompile", False),
    "dist_url": ("distributed.init_method", "env://"),
    "fsdp": ("distributed.strategy", "ddp"),
}
MEGATRON = {
    "optimizer": ("optimizer._target_", AdamW._target_),
    "weight_decay": ("optimizer.weight_decay", 0.01),
    "adam_beta1": ("optimizer.beta1", 0.9),
    "adam_beta2": ("optimizer.beta2", 0.999),
    "adam_eps": ("optimizer.eps", 1e-8),
    "clip_grad": ("hparams.grad_clip_norm", 1.0),
    "min_lr": ("scheduler.min_lr", 0.0),
    "use_distributed_optimizer": ("distributed.shard_optimizer", False),
    "overlap_grad_reduce": ("distributed.overlap_grad_reduce", False),
    "overlap_param_gather": ("distributed.overlap_param_gather", False),
    "bf16, fp16": ("precision.mode", "fp32"),
    "lr_decay_style": ("scheduler._target_", Linear._target_),
    "lr_decay_iters": ("scheduler.horizon", "1.0"),
    "lr_warmup_iters": ("scheduler.warmup", "0"),
    "lr_warmup_init": ("scheduler.warmup_init", 0.0),
    "start_weight_decay": ("scheduler.start_weight_decay", None),
    "end_weight_decay": ("scheduler.end_weight_decay", None),
    "weight_decay_incr_style": ("scheduler.weight_decay_incr_style", "constant"),
    "override_opt_param_scheduler, use_checkpoint_opt_param_scheduler": ("checkpoint.scheduler_on_resume", "match"),
}
STEPS = "hparams.max_steps=20000"


@pytest.mark.parametrize(("preset", "document"), [("vla_foundry", VLA_FOUNDRY), ("megatron", MEGATRON)])
def test_preset_fields_have_the_documented_defaults(preset, document):
    # The default composition differs from the schema defaults, so a field missing in the preset fails here.
    composed = compose(f"hparams={preset}", STEPS)
    for name, (key, value) in document.items():
        own = OmegaConf.select(composed, key)
        assert getattr(own, "name", own) == value, name


def test_vla_foundry_preset_accumulates_eight_microbatches(monkeypatch):
    config = configure("hparams=vla_foundry", STEPS, "distributed.nproc_per_node=8")
    assert config.hparams.accum_freq == 512 // (8 * 8) == 8
    assert type(config.distributed) is DDP


def test_wsd_decay_defaults_match_the_documents():
    config = configure("hparams=vla_foundry", STEPS, "scheduler=wsd")
    assert type(config.scheduler) is WSD
    assert (config.scheduler.decay, config.scheduler.warmup) == ("0.3", "1000")
    assert configure("hparams=megatron", STEPS, "scheduler=wsd").scheduler.decay_style.name == "exponential"


def test_megatron_preset_reads_the_learning_rate_at_the_start_of_a_step():
    config = configure("hparams=megatron", STEPS, "hparams.lr=1e-3")
    budget = Budget(total_samples=80, batch_sizes=BatchSizes.constant(8), samples_per_epoch=80)
    schedule = build_schedule(config, budget)
    rates = [schedule.lr(8 * step, 8 * step + 8) for step in range(10)]
    assert rates == pytest.approx([1e-3 * (1 - step / 10) for step in range(10)])
