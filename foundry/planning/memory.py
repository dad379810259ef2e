"""Estimate of a run's memory by part, from shapes and types alone.

Sharding follows `foundry.parallel.wrap`; under tensor parallelism, all bytes are counted on the model of one rank, with
divided matrices. Weights, gradients, optimizer state, averaged weights and buffers are exact. Tensors in flight follow
the design of FSDP2, without the buffers of its collectives. Activations are an estimate.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.lengths import resolve_batch_sizes
from foundry.config.schemas.distributed import FSDP, resolve_distributed
from foundry.config.schemas.hparams import CheckpointingPolicy
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.schemas.root import Config
from foundry.core.errors import format_reason
from foundry.core.protocols import Microbatch, Objective
from foundry.parallel.precision import PrecisionPolicy, cast_inputs
from foundry.parallel.process_group import World
from foundry.parts.model import build_model
from foundry.parts.objective import build_objective
from foundry.planning.activations import Activations, count_activations
from foundry.planning.fake import FakeModel
from foundry.planning.layout import Layout, build_layout, grad_bytes, num_bytes
from foundry.planning.moments import FrozenModels, Parts, count_moments
from foundry.planning.optimizer_memory import measure_optimizers
from foundry.planning.rank_model import copy_in_dtypes, model_of_rank

_FLOAT32_BYTES = 4
_COUNTED_SAMPLES = 64


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0, which has the largest shards.

    Attributes:
        weights: parameters, or this rank's shards of them.
        frozen_weights: the part of `weights` that is not trained.
        gathered: transient: gathered weights of the FSDP2 units that compute or are prefetched.
        gradients: peak of the gradients; FSDP2 keeps whole gradients between microbatches without a reduction.
        reducing: transient: gradients in a reduction.
        optimizer: state of the optimizers without scalars; None if they cannot step on fake tensors.
        ema: averaged weights.
        frozen: frozen models with their buffers.
        buffers: buffers of the model.
        activations_estimated: activations that the forward pass of one microbatch saves; None if unknown.
        generation: transient: gathered weights, and keys and values of the answers that are generated at a time.
        host: part of weights, gradients, optimizer, ema and frozen that is in host memory instead of device memory.
        moments: bytes on the device at each of the moments of `foundry.planning.moments`, without unknown parts.
        note: why a part of the memory is unknown; None if all are known.
    """

    weights: int
    frozen_weights: int
    gathered: int
    gradients: int
    reducing: int
    optimizer: int | None
    ema: int
    frozen: int
    buffers: int
    activations_estimated: int | None
    generation: int
    host: int
    moments: Mapping[str, int]
    note: str | None

    @property
    def total(self) -> int:
        """Peak bytes on the device."""
        return max(self.moments.values())

    @property
    def peak(self) -> str:
        """Name of the moment of the peak."""
        return max(self.moments, key=self.moments.__getitem__)


def estimate_memory(
    config: Config,
    fake: FakeModel,
    *,
    world_size: int,
    microbatch: Microbatch | None,
    device_type: str,
    tokenizer: Any = None,
    answer_tokens: int | None = None,
    pack_tokens: int | None = None,
) -> Memory:
    """Estimate the memory on the rank that needs the most.

    Args:
        config: configuration of the run.
        fake: model of the run; not modified.
        world_size: number of ranks.
        microbatch: real tensors with the shapes of a microbatch; None if unknown, which leaves activations unknown.
        device_type: "cuda" or "cpu"; on a CPU offloading has no effect.
        tokenizer: tokenizer of the data, for objectives that use one.
        answer_tokens: tokens of the longest prompt with an answer, if the objective generates answers.
        pack_tokens: tokens of a row that holds several answers; None if each answer has its own row.

    Raises:
        ConfigError: the strategy does not fit the number of ranks, or the optimizer does not fit the model.
    """
    rank = _Rank(config, fake, world_size, device_type, PrecisionPolicy(config.precision.mode))
    num_parts = config.distributed.tensor_parallel
    model = model_of_rank(fake.model, rank.policy, narrow_frozen=config.peft.narrows_base, num_parts=num_parts)
    layout, accumulates = rank.layout_of(model), rank.accumulates()
    optimizers = measure_optimizers(config, model)
    world = World(0, 0, world_size, world_size, torch.device("cpu"))
    objective = build_objective(config.objective, config.peft, world, tokenizer)
    frozen = _lay_out_frozen(rank, objective)
    generation, generation_note = 0, None
    if objective.makes_samples and answer_tokens is not None:
        microbatch = objective.example(config.hparams.per_gpu_batch_size, pack_tokens or answer_tokens)
        layouts = [layout, *(frozen.layouts[name] for name in objective.recorded_models)]
        generation, generation_note = _count_generation(rank, objective, layouts, answer_tokens)
    activations, activations_note = _count_activations(rank, objective, model, layout, microbatch)
    grad_shards, all_gradients = layout.parts(grad_bytes), sum(map(grad_bytes, model.parameters()))
    parts = Parts(
        layout=layout,
        frozen=frozen,
        sync=config.distributed.gradient_sync,
        accumulates=accumulates,
        offloads=layout.offloads and device_type != "cpu",
        weights=layout.parts(num_bytes),
        optimizer=layout.parts(lambda parameter: optimizers.state.get(parameter, 0)),
        ema=layout.parts(partial(_average_bytes, config)),
        buffers=sum(map(num_bytes, model.buffers())),
        activations=activations,
        generation=generation,
        # `optimizers.temporary` is for whole parameters; a rank updates its shards only.
        temporary=optimizers.temporary * sum(grad_shards) // max(1, all_gradients),
    )
    notes = [note for note in (optimizers.note, activations_note, generation_note) if note is not None]
    return Memory(
        weights=sum(parts.weights),
        frozen_weights=sum(parts.weights) - sum(grad_shards),
        gathered=parts.gathered(),
        gradients=layout.gradients(parts.sync, accumulates),
        reducing=layout.reducing(parts.sync, accumulates),
        optimizer=sum(parts.optimizer) if optimizers.note is None else None,
        ema=sum(parts.ema),
        frozen=frozen.total,
        buffers=parts.buffers,
        activations_estimated=None if activations is None else activations.saved,
        generation=generation,
        host=parts.host_weights + parts.host_states + grad_shards[0] * parts.offloads,
        moments=count_moments(parts),
        note="; ".join(notes) or None,
    )


@dataclass(frozen=True)
class _Rank:
    """The rank whose memory is estimated.

    Attributes:
        config: configuration of the run.
        fake: model of the run.
        world_size: number of ranks.
        device_type: "cuda" or "cpu".
        policy: types of weights, compute and reduction.
    """

    config: Config
    fake: FakeModel
    world_size: int
    device_type: str
    policy: PrecisionPolicy

    def layout_of(self, model: nn.Module) -> Layout:
        """Return the layout of a model of this rank."""
        return build_layout(self.config.distributed, model, self.policy, self.world_size)

    def accumulates(self) -> bool:
        """Return whether a window has several microbatches."""
        hparams, dp_size = self.config.hparams, self.config.distributed.dp_size(self.world_size)
        sizes = resolve_batch_sizes(hparams, dp_size=dp_size, tokens_per_sample=None).sizes
        return max(sizes) > dp_size * hparams.per_gpu_batch_size


def _lay_out_frozen(rank: _Rank, objective: Objective) -> FrozenModels:
    """Return the frozen models of the objective, and pass them to it.

    Returns no models if the objective has columns: the frozen models then run before the first step, and without
    gradients need less memory than a step.
    """
    if objective.compare is None:
        return FrozenModels({}, 0)
    config = rank.config
    is_sharded = isinstance(resolve_distributed(config.distributed, rank.world_size), FSDP)
    num_parts = config.distributed.tensor_parallel if is_sharded else 1
    frozen = dict[str, nn.Module]()
    for name, node in objective.frozen_models.items():
        with rank.fake.mode:
            model = rank.fake.model if node is None else build_model(config, node)
        frozen[name] = model_of_rank(model, rank.policy, num_parts=num_parts).requires_grad_(False).eval()
    objective.compare(frozen)
    if objective.columns:
        return FrozenModels({}, 0)
    layouts = {
        name: rank.layout_of(model) if is_sharded else Layout([], list(model.parameters()))
        for name, model in frozen.items()
    }
    return FrozenModels(layouts, sum(num_bytes(buffer) for model in frozen.values() for buffer in model.buffers()))


def _count_generation(
    rank: _Rank, objective: Objective, layouts: Sequence[Layout], answer_tokens: int
) -> tuple[int, str | None]:
    """Return the bytes that only the generation of completions needs, and the reason if a part of them is unknown.

    Args:
        rank: the rank.
        objective: objective that generates completions.
        layouts: layouts of the models that generate or score completions.
        answer_tokens: tokens of the longest prompt with an answer.
    """
    distributed = rank.config.distributed
    ungathered = sum(layout.ungathered(distributed.gradient_sync) for layout in layouts)
    cache = objective.bytes_for_samples(rank.fake.model, answer_tokens, rank.policy.compute_dtype.itemsize)
    if cache is None:
        return ungathered, "the memory of keys and values is unknown"
    return ungathered + cache // distributed.tensor_parallel, None


def checkpoint_bytes(config: Config, fake: FakeModel) -> int | None:
    """Return the size of a checkpoint over all ranks: weights, averaged weights and optimizer state.

    Args:
        config: configuration of the run.
        fake: model of the run; not modified.

    Returns:
        Bytes of the tensors, with tied ones counted once; None if the optimizers cannot step on fake tensors.

    Raises:
        ConfigError: the optimizer does not fit the model.
    """
    model = model_of_rank(fake.model, PrecisionPolicy(config.precision.mode), narrow_frozen=config.peft.narrows_base)
    optimizers = measure_optimizers(config, model)
    if optimizers.note is not None:
        return None
    saved_tensors: set[Tensor] = set(model.state_dict(keep_vars=True).values())
    if isinstance(config.peft, LoRA):
        saved_tensors = {tensor for tensor in saved_tensors if tensor.requires_grad}
    ema = sum(_average_bytes(config, parameter) for parameter in model.parameters())
    return sum(map(num_bytes, saved_tensors)) + ema + sum(optimizers.state.values())


def optimizer_bytes(config: Config, fake: FakeModel) -> dict[str, float]:
    """Return the bytes of optimizer state per element of each trained parameter, by the parameter's name.

    Args:
        config: configuration of the run.
        fake: model of the run; not modified.

    Raises:
        RuntimeError: the optimizers cannot step on fake tensors.
    """
    model = model_of_rank(fake.model, PrecisionPolicy(config.precision.mode), narrow_frozen=config.peft.narrows_base)
    optimizers = measure_optimizers(config, model)
    if optimizers.note is not None:
        raise RuntimeError(optimizers.note)
    state = optimizers.state
    return {name: state[p] / p.numel() for name, p in model.named_parameters() if p in state}


def _count_activations(
    rank: _Rank, objective: Objective, model: nn.Module, layout: Layout, microbatch: Microbatch | None
) -> tuple[Activations | None, str | None]:
    """Return the activations, or the reason why they are unknown; `model` holds the parameters of `layout`."""
    if microbatch is None:
        return None, "activations are unknown without the shapes of a microbatch"
    samples = len(next(iter(microbatch.values())))
    if samples > 2 * _COUNTED_SAMPLES:
        # The bytes are linear in the samples. Counting all samples is slow if the loss loops over tiles of positions.
        parts = [{name: t[:few] for name, t in microbatch.items()} for few in (_COUNTED_SAMPLES, 2 * _COUNTED_SAMPLES)]
        (few, note), (double, _) = [_count_activations(rank, objective, model, layout, part) for part in parts]
        if few is None or double is None:
            return None, note
        return few.extrapolated(double, (samples, _COUNTED_SAMPLES)), None
    # FSDP2 gathers weights in the compute type, so autocast does not copy them.
    gathered: dict[Tensor, torch.dtype | None] = {
        p: unit.gather_dtype for unit in layout.units for p in unit.parameters
    }
    model = copy_in_dtypes(model, lambda tensor: gathered.get(tensor) or tensor.dtype)
    if rank.policy.mode is PrecisionMode.pure_bf16:
        model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    hparams = rank.config.hparams
    try:
        with _quiet():
            activations = count_activations(
                objective,
                model,
                microbatch,
                mode=rank.fake.mode,
                autocast=rank.policy.autocast(torch.device("cpu")),
                device_type=rank.device_type,
                grad_checkpointing=hparams.grad_checkpointing,
                selective=hparams.grad_checkpointing_policy is CheckpointingPolicy.selective,
            )
    except Exception as error:  # a model may read values, or use an operation without a fake kernel
        return None, f"the model cannot run on fake tensors ({format_reason(error)})"
    return activations, None


def _average_bytes(config: Config, parameter: nn.Parameter) -> int:
    is_averaged = config.hparams.ema_decay is not None and parameter.requires_grad
    return _FLOAT32_BYTES * parameter.numel() if is_averaged else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of operators that fail on fake tensors, since `Memory.note` reports the failure."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled
