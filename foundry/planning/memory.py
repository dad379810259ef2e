"""Estimate of a run's memory by part, from shapes and types alone.

Sharding follows `foundry.parallel.wrap`; under tensor parallelism, all bytes are counted on the model of one rank, with
divided matrices. Weights, gradients, optimizer state, averaged weights and buffers are exact. Tensors in flight follow
the design of FSDP2, without the buffers of its collectives. Activations are an estimate.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.config.lengths import resolve_batch_sizes
from foundry.config.schemas.distributed import FSDP, resolve_distributed
from foundry.config.schemas.hparams import CheckpointingPolicy
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.schemas.root import Config
from foundry.core.errors import format_reason
from foundry.core.protocols import Microbatch, Objective
from foundry.models.lora import frozen_matrices
from foundry.optim.adamw_cautious import CautiousAdamW
from foundry.parallel.precision import PrecisionPolicy, cast_inputs
from foundry.parallel.process_group import World
from foundry.parallel.tensor_parallel import divided_dims, is_divisible
from foundry.parts.model import build_model
from foundry.parts.objective import build_objective
from foundry.parts.optimization import build_optimizers
from foundry.planning.activations import Activations, count_activations
from foundry.planning.fake import FakeModel
from foundry.planning.layout import Layout, build_layout, grad_bytes, num_bytes
from foundry.planning.live_bytes import LiveBytes
from foundry.planning.moments import count_moments

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
    policy = PrecisionPolicy(config.precision.mode)
    num_parts = config.distributed.tensor_parallel
    model = _model_of_rank(fake.model, policy, narrow_frozen=config.peft.narrows_base, num_parts=num_parts)
    layout = build_layout(config.distributed, model, policy, world_size)
    dp_size = config.distributed.dp_size(world_size)
    sizes = resolve_batch_sizes(config.hparams, dp_size=dp_size, tokens_per_sample=None).sizes
    accumulates = max(sizes) > dp_size * config.hparams.per_gpu_batch_size
    state, temporary, optimizer_note = _optimizer_state(config, model)
    objective = build_objective(
        config.objective, config.peft, World(0, 0, world_size, world_size, torch.device("cpu")), tokenizer
    )
    frozen = _build_frozen(config, objective, fake, policy, world_size)
    generation, generation_note = 0, None
    if objective.makes_samples and answer_tokens is not None:
        microbatch = objective.example(config.hparams.per_gpu_batch_size, pack_tokens or answer_tokens)
        recorded_layouts = [layout, *(frozen[name][0] for name in objective.recorded_models)]
        ungathered = sum(unit_layout.ungathered(config.distributed.gradient_sync) for unit_layout in recorded_layouts)
        cache = objective.bytes_for_samples(fake.model, answer_tokens, policy.compute_dtype.itemsize)
        generation = ungathered + (cache or 0) // num_parts
        generation_note = "the memory of keys and values is unknown" if cache is None else None
    activations, activations_note = _activations(
        config, objective, model, fake.mode, policy, layout, microbatch, device_type
    )
    sync, offloads = config.distributed.gradient_sync, layout.offloads and device_type != "cpu"
    shards, grad_shards = layout.parts(num_bytes), layout.parts(grad_bytes)
    optimizer = layout.parts(lambda parameter: state.get(parameter, 0))
    ema = layout.parts(partial(_average_bytes, config))
    frozen_layouts = [unit_layout for unit_layout, _ in frozen.values()]
    frozen_parts = [unit_layout.parts(num_bytes) for unit_layout in frozen_layouts]
    frozen_bytes = sum(map(sum, frozen_parts)) + sum(buffers for _, buffers in frozen.values())
    buffers = sum(map(num_bytes, model.buffers()))
    gathered = sum(unit_layout.gathered(sync) for unit_layout in (layout, *frozen_layouts))
    weights_in_host = (shards[0] + sum(part for part, _ in frozen_parts)) * offloads
    states_in_host = weights_in_host + (optimizer[0] + ema[0]) * offloads
    weight_bytes = sum(shards) + frozen_bytes + buffers
    moments = count_moments(
        layout,
        sync,
        accumulates=accumulates,
        offloads=offloads,
        built_weights=weight_bytes
        - weights_in_host
        + max(unit_layout.largest_unit() for unit_layout in (layout, *frozen_layouts)),
        states=weight_bytes + sum(optimizer) + sum(ema) - states_in_host,
        gathered=gathered,
        gathered_in_loss=sum(unit_layout.gathered(sync, ahead=False) for unit_layout in (layout, *frozen_layouts)),
        activations=activations or Activations(0, 0, 0, 0, 0, False),
        generation=generation,
        # `temporary` is for whole parameters; a rank updates its shards only.
        temporary=temporary * sum(grad_shards) // max(1, sum(map(grad_bytes, model.parameters()))),
    )
    notes = [note for note in (optimizer_note, activations_note, generation_note) if note is not None]
    return Memory(
        weights=sum(shards),
        frozen_weights=sum(shards) - sum(grad_shards),
        gathered=gathered,
        gradients=layout.gradients(sync, accumulates),
        reducing=layout.reducing(sync, accumulates),
        optimizer=sum(optimizer) if optimizer_note is None else None,
        ema=sum(ema),
        frozen=frozen_bytes,
        buffers=buffers,
        activations_estimated=None if activations is None else activations.saved,
        generation=generation,
        host=states_in_host + grad_shards[0] * offloads,
        moments=moments,
        note="; ".join(notes) or None,
    )


def _build_frozen(
    config: Config, objective: Objective, fake: FakeModel, policy: PrecisionPolicy, world_size: int
) -> dict[str, tuple[Layout, int]]:
    """Return the layout of each frozen model of the objective and the bytes of its buffers, by the model's name.

    Also passes the frozen models to the objective. Returns an empty dict if the objective has columns: the frozen
    models then run before the first step, and without gradients need less memory than a step.
    """
    if objective.compare is None:
        return {}
    is_sharded = isinstance(resolve_distributed(config.distributed, world_size), FSDP)
    num_parts = config.distributed.tensor_parallel if is_sharded else 1
    frozen = dict[str, nn.Module]()
    for name, node in objective.frozen_models.items():
        with fake.mode:
            model = fake.model if node is None else build_model(config, node)
        frozen[name] = _model_of_rank(model, policy, num_parts=num_parts).requires_grad_(False).eval()
    objective.compare(frozen)
    if objective.columns:
        return {}
    return {
        name: (
            build_layout(config.distributed, model, policy, world_size)
            if is_sharded
            else Layout([], list(model.parameters())),
            sum(map(num_bytes, model.buffers())),
        )
        for name, model in frozen.items()
    }


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
    model = _model_of_rank(fake.model, PrecisionPolicy(config.precision.mode), narrow_frozen=config.peft.narrows_base)
    state, _, note = _optimizer_state(config, model)
    if note is not None:
        return None
    saved_tensors: set[Tensor] = set(model.state_dict(keep_vars=True).values())
    if isinstance(config.peft, LoRA):
        saved_tensors = {tensor for tensor in saved_tensors if tensor.requires_grad}
    ema = sum(_average_bytes(config, parameter) for parameter in model.parameters())
    return sum(map(num_bytes, saved_tensors)) + ema + sum(state.values())


def optimizer_bytes(config: Config, fake: FakeModel) -> dict[str, float]:
    """Return the bytes of optimizer state per element of each trained parameter, by the parameter's name.

    Args:
        config: configuration of the run.
        fake: model of the run; not modified.

    Raises:
        RuntimeError: the optimizers cannot step on fake tensors.
    """
    model = _model_of_rank(fake.model, PrecisionPolicy(config.precision.mode), narrow_frozen=config.peft.narrows_base)
    state, _, note = _optimizer_state(config, model)
    if note is not None:
        raise RuntimeError(note)
    return {name: state[p] / p.numel() for name, p in model.named_parameters() if p in state}


def _optimizer_state(config: Config, model: nn.Module) -> tuple[dict[Tensor, int], int, str | None]:
    """Return the bytes of each whole parameter's state, and the bytes that a step allocates once the state exists.

    Scalars are not counted. The third value is the reason why the bytes are unknown; None if they are known.
    """
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    state: dict[Tensor, int] = {}
    temporary = 0
    optimizers = build_optimizers(config, model)
    try:
        for optimizer in optimizers:
            fused = [group for group in optimizer.param_groups if group.get("fused")]
            for group in fused:
                # Without fused kernels the state is the same; some fused kernels do not support fake tensors.
                group["fused"] = False
            optimizer.step()
            for tensor, parameter_state in optimizer.state.items():
                tensors = [value for value in parameter_state.values() if isinstance(value, Tensor) and value.ndim > 0]
                state[tensor] = state.get(tensor, 0) + sum(map(num_bytes, tensors))
            if not fused or isinstance(optimizer, CautiousAdamW):  # fused kernels allocate nothing; the decay does
                live = LiveBytes()
                with live:
                    optimizer.step()
                temporary = max(temporary, live.peak)
    except Exception as error:  # a user's optimizer may fail in any way on fake tensors
        return {}, 0, f"the optimizers cannot step on fake tensors ({format_reason(error)})"
    return state, temporary, None


def _activations(
    config: Config,
    objective: Objective,
    model: nn.Module,
    mode: FakeTensorMode,
    policy: PrecisionPolicy,
    layout: Layout,
    microbatch: Microbatch | None,
    device_type: str,
) -> tuple[Activations | None, str | None]:
    """Return the activations, or the reason why they are unknown; `model` holds the parameters of `layout`."""
    if microbatch is None:
        return None, "activations are unknown without the shapes of a microbatch"
    samples = len(next(iter(microbatch.values())))
    if samples > 2 * _COUNTED_SAMPLES:
        # The bytes are linear in the samples. Counting all samples is slow if the loss loops over tiles of positions.
        parts = [{name: t[:few] for name, t in microbatch.items()} for few in (_COUNTED_SAMPLES, 2 * _COUNTED_SAMPLES)]
        count = partial(_activations, config, objective, model, mode, policy, layout, device_type=device_type)
        (few, note), (double, _) = [count(part) for part in parts]
        if few is None or double is None:
            return None, note
        return few.extrapolated(double, (samples, _COUNTED_SAMPLES)), None
    # FSDP2 gathers weights in the compute type, so autocast does not copy them.
    gathered: dict[Tensor, torch.dtype | None] = {
        p: unit.gather_dtype for unit in layout.units for p in unit.parameters
    }
    model = _copy_in_dtypes(model, lambda tensor: gathered.get(tensor) or tensor.dtype)
    if policy.mode is PrecisionMode.pure_bf16:
        model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    try:
        with _quiet():
            activations = count_activations(
                objective,
                model,
                microbatch,
                mode=mode,
                autocast=policy.autocast(torch.device("cpu")),
                device_type=device_type,
                grad_checkpointing=config.hparams.grad_checkpointing,
                selective=config.hparams.grad_checkpointing_policy is CheckpointingPolicy.selective,
            )
    except Exception as error:  # a model may read values, or use an operation without a fake kernel
        return None, f"the model cannot run on fake tensors ({format_reason(error)})"
    return activations, None


def _model_of_rank(
    model: nn.Module, policy: PrecisionPolicy, *, narrow_frozen: bool = False, num_parts: int = 1
) -> nn.Module:
    """Return a copy of a fake model as one of `num_parts` tensor-parallel ranks holds it.

    It has the types of a model after `PrecisionPolicy.prepare`.
    """
    is_cast = policy.mode is PrecisionMode.pure_bf16
    narrow_tensors: set[Tensor] = {*frozen_matrices(model)} if narrow_frozen and policy.is_amp else set()

    def dtype_of(tensor: Tensor) -> torch.dtype:
        if tensor in narrow_tensors:
            return policy.compute_dtype
        return torch.bfloat16 if is_cast and tensor.is_floating_point() else tensor.dtype

    dims = divided_dims(model) if is_divisible(model, num_parts) else {}
    return _copy_in_dtypes(model, dtype_of, {parameter: (dim, num_parts) for parameter, dim in dims.items()})


def _copy_in_dtypes(
    model: nn.Module,
    dtype_of: Callable[[Tensor], torch.dtype],
    divisions: Mapping[Tensor, tuple[int, int]] | None = None,
) -> nn.Module:
    """Return a copy of a fake model in other types; `Module.to` cannot change fake tensors in place.

    `divisions` maps a parameter to a dimension and a number of parts: the copy has only the first of these parts.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dim, num_parts = (divisions or {}).get(parameter, (0, 1))
        full = parameter.detach()
        part = full.narrow(dim, 0, full.shape[dim] // num_parts) if num_parts > 1 else full
        data = part.to(dtype_of(parameter), copy=True)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to(dtype_of(buffer), copy=True)
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


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
