"""Check before the first step: forward and backward passes on microbatches of the largest shape, without an update.

Problems with memory, kernels and compilation appear within a minute, not at the longest batch.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from foundry.checkpoint.rng import rng_state, set_rng_state
from foundry.config.schemas.distributed import GradientSync
from foundry.core.errors import format_reason
from foundry.core.protocols import Microbatch, Objective, RunContext
from foundry.core.sharded import local_part
from foundry.data.conversations.examples import IGNORED_TARGET
from foundry.data.dataset import Dataset
from foundry.data.packing import find_bounds
from foundry.engine.trained_models import Trained
from foundry.parallel.device import synchronize
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.training.step import TrainStep

log = logging.getLogger(__name__)

_PADDING = {"tokens": 0, "targets": IGNORED_TARGET, "documents": -1}
"""Padding values of a packed row, by column."""


class FirstStepCheck:
    """Runs forward, backward and reduction on the largest microbatches, with memory for the optimizer state reserved.

    After a successful check, RNG states, buffers and gradients are as before it. Guard, loss scaler, optimizers and
    averaged weights are not called, and no window is read.

    Args:
        run: context with the configuration, the data and the ranks.
        trained: model and objective of the run.
        step: optimizer step of the run.
    """

    def __init__(self, run: RunContext, trained: Trained, step: TrainStep) -> None:
        self._run, self._trained, self._step = run, trained, step

    def __call__(self) -> None:
        """Run the check, or log why the run cannot be checked; every rank calls it.

        Raises:
            Exception: any error of the passes, such as torch.OutOfMemoryError.
        """
        world, trained, config = self._run.world, self._trained, self._run.config
        began = time.monotonic()
        accumulates = max(trained.budget.batch_sizes.sizes) > world.dp_size * config.hparams.per_gpu_batch_size
        with _restored_state([trained.parallel.model, *trained.frozen.values()], world):
            microbatch = self._agreed_microbatch()
            if microbatch is None:
                return
            state_memory = self._reserve_optimizer_state()
            keeps_gradients = accumulates and config.distributed.gradient_sync is not GradientSync.every
            with _without_buckets(trained.parallel.model, keeps_gradients=keeps_gradients):
                # Two microbatches if a window has several: unsharded gradients of the first coexist with the
                # activations of the second.
                self._step.discard_gradients([microbatch] * (1 + accumulates))
            del state_memory
            synchronize(world.device)
        if world.is_main:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in microbatch.items() if name != "position")
            log.info("the first step fits: checked with %s in %.1f s", shapes, time.monotonic() - began)

    def _agreed_microbatch(self) -> Microbatch | None:
        """Return this rank's largest microbatch; if any rank cannot build one, log the reason and return None."""
        microbatch, reason = None, None
        try:
            microbatch = self._largest_microbatch()
        except Exception as error:  # raised by a custom dataset or objective
            reason = format_reason(error)
        reasons = [rank_reason for rank_reason in gather(reason, self._run.world) if rank_reason is not None]
        if not reasons:
            return microbatch
        if self._run.world.is_main:
            log.info("the first step is not checked in advance: %s", reasons[0])
        return None

    def _largest_microbatch(self) -> Microbatch:
        # Imported here, since importing planning would delay the start of runs without the check.
        from foundry.planning.fits import answer_tokens, read_longest

        config, data, objective = self._run.config, self._run.data, self._trained.objective
        num_rows, pack_tokens = config.hparams.per_gpu_batch_size, self._trained.pack_tokens
        if objective.makes_samples:
            longest = answer_tokens(config, data)
            assert longest is not None, "an objective that makes samples has prompts"
            return _packed_example(objective, num_rows, longest, pack_tokens)
        if objective.build_source is not None:
            raise TypeError(f"{type(objective).__name__} builds its own window source, whose microbatches are unknown")
        if pack_tokens is not None:
            batch = _full_rows(data.train, num_rows, pack_tokens)
        else:
            batch = {name: t.contiguous() for name, t in read_longest(data, num_rows).items()}
        first = self._run.world.dp_rank * num_rows
        return {**batch, "position": torch.arange(first, first + num_rows)}

    def _reserve_optimizer_state(self) -> list[Tensor]:
        """Allocate as much memory as the optimizers will need for their state; none if it exists, or is unknown."""
        if any(optimizer.state for optimizer in self._trained.optimizers):
            return []
        from foundry.planning.fake import build_adapted, build_fake
        from foundry.planning.memory import optimizer_bytes

        config = self._run.config
        try:
            per_element = optimizer_bytes(config, build_fake(lambda: build_adapted(config)))
        except Exception as error:  # a custom model or optimizer may not support fake tensors
            log.info("the check of the first step excludes the optimizer state: %s", format_reason(error))
            return []
        parts = {name: local_part(p.detach()) for name, p in self._trained.parallel.inner.named_parameters()}
        return [
            torch.empty(round(size * parts[name].numel()), dtype=torch.uint8, device=parts[name].device)
            for name, size in per_element.items()
            if name in parts
        ]


def _full_rows(dataset: Dataset, num_rows: int, pack_tokens: int) -> Microbatch:
    """Return rows with as many copies of the longest sample as fit, padded to `pack_tokens`."""
    lengths = dataset.lengths_of([dataset.longest])
    assert lengths is not None, "a loader refuses to pack samples of unknown lengths"
    copies = max(1, pack_tokens // int(lengths.max()))
    batch = dataset.packed([[dataset.longest] * copies] * num_rows)
    for name, fill in _PADDING.items():
        batch[name] = pad(batch[name], (0, pack_tokens - batch[name].shape[-1]), value=fill)
    return {**batch, **find_bounds(batch["documents"])}


def _packed_example(objective: Objective, num_rows: int, longest: int, pack_tokens: int | None) -> Microbatch:
    """Return a microbatch of made completions of the largest shape, one in each row."""
    batch = objective.example(num_rows, pack_tokens or longest)
    if pack_tokens is None:
        return batch
    documents = torch.arange(num_rows)[:, None].expand(num_rows, pack_tokens).contiguous()
    return {**batch, "documents": documents, **find_bounds(documents)}


@contextmanager
def _restored_state(models: Sequence[nn.Module], world: World) -> Iterator[None]:
    """Context manager that restores RNG states and buffers after the body, unless it raises."""
    generators = rng_state(world.device)
    modules = [module for model in models for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
    values = [
        (b, b.detach().clone()) for _, module_buffers in buffers for b in module_buffers.values() if b is not None
    ]
    yield
    with torch.no_grad():
        for module, module_buffers in buffers:
            module._buffers.update(module_buffers)
        for buffer, value in values:
            buffer.copy_(value)
    set_rng_state(generators, world.device)


@contextmanager
def _without_buckets(model: nn.Module, *, keeps_gradients: bool) -> Iterator[None]:
    """Context manager without reductions by DDP, since DDP reorders its gradient buckets after the first reduction.

    The order of the buckets determines the rounding of sums over more than two ranks. Without `keeps_gradients`, each
    gradient is freed at once, since in training gradients are stored in the buckets.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad and not keeps_gradients:
                stack.callback(parameter.register_post_accumulate_grad_hook(free).remove)  # type: ignore[no-untyped-call]
        stack.enter_context(model.no_sync())
        yield
