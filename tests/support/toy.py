"""A small model with all features that are hard to wrap, and a manual training window."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from foundry.config.schemas.precision import PrecisionMode
from foundry.models.fsdp_block import FSDPBlock
from foundry.parallel.grad_norm import clip_grad_norm_
from foundry.parallel.precision import PrecisionPolicy

NUM_SAMPLES, SEQ, VOCAB, DIM, NUM_BLOCKS = 16, 6, 29, 12, 3


class ToyBlock(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.gain * self.mlp(self.norm2(x))


class Toy(nn.Module):
    """Causal language model with a tied head; no number of ranks divides the vocabulary size of 29."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, VOCAB))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature + self.offset


def global_batch(step):
    """Return tokens (NUM_SAMPLES, SEQ + 1) and the mask of valid targets (NUM_SAMPLES, SEQ), empty for some samples."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (NUM_SAMPLES, SEQ + 1), generator=generator)
    lengths = torch.randint(0, SEQ + 1, (NUM_SAMPLES, 1), generator=generator)
    lengths[:4] = 0
    return tokens, torch.arange(SEQ) < lengths


def sum_loss(model, tokens, valid):
    logits = model(tokens[:, :-1]).float()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * valid.flatten()).sum()


def backward_window(parallel, policy, world, step, num_microbatches, scale=lambda loss: loss):
    """Run forward and backward passes over this rank's share of the global batch."""
    tokens, valid = (tensor.to(world.device) for tensor in global_batch(step))
    total = valid.sum()
    num = num_microbatches
    share = NUM_SAMPLES // (world.world_size * num)
    for index in range(num):
        start = (world.rank * num + index) * share
        part = slice(start, start + share)
        with parallel.sync.microbatch(first=index == 0, last=index == num - 1):
            with policy.autocast(world.device):
                loss = sum_loss(parallel.model, tokens[part], valid[part])
            scale(loss * world.world_size / total).backward()
    parallel.sync.finish()


def train(parallel, policy, world, *, num_steps=3, num_microbatches=2, clip=0.5):
    """Run AdamW steps; return (gradients of the last step, gradient norms, parameters), all unsharded."""
    optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    norms = []
    for step in range(num_steps):
        optimizer.zero_grad()
        backward_window(parallel, policy, world, step, num_microbatches)
        grads = {name: full_tensor(parameter.grad) for name, parameter in parallel.inner.named_parameters()}
        norms.append(clip_grad_norm_(parallel.model.parameters(), clip))
        optimizer.step()
    return grads, torch.stack(norms), whole_parameters(parallel)


def whole_parameters(parallel):
    return {name: full_tensor(parameter.detach()) for name, parameter in parallel.inner.named_parameters()}


def full_tensor(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in theirs)


FP32 = PrecisionPolicy(PrecisionMode.fp32)
