"""Tensor parallelism: shards a model's matrices over ranks that process the same samples, before FSDP2 is applied.

The model's plan declares how each module is sharded (`Split`). Weights in the plan become DTensors sharded over the
tensor-parallel mesh dimension. The remaining parameters become replicated DTensors, except parameters that FSDP2 does
not shard either. Norm, optimizer and checkpoint therefore need no special code: placements tell which values to count
and to write once. Each rank builds the whole model and keeps its own part, without communication.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from foundry.core.errors import ConfigError, Violation
from foundry.core.model_hooks import hook
from foundry.models.fsdp_block import find_blocks
from foundry.models.tensor_parallel import Split, embed_columns, embed_divided
from foundry.parallel.precision import PrecisionPolicy

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

_KEY = "distributed.tensor_parallel"


def is_divisible(model: nn.Module, num_ranks: int) -> bool:
    """Return whether a model has a tensor-parallel plan that can be applied with this number of ranks."""
    return hook(model, "tensor_parallel_plan") is not None and not list(_violations(model, num_ranks))


def divided_dims(model: nn.Module) -> dict[Tensor, int]:
    """Return the sharded parameters, each with its sharded dimension; the remaining parameters are replicated."""
    return {
        module.weight: 1 if split is Split.rows or _is_by_feature(module, split) else 0
        for _, module, split in _planned(model)
        if split is not Split.input and isinstance(module, (nn.Linear, nn.Embedding))
    }


def divide(model: nn.Module, mesh: DeviceMesh, policy: PrecisionPolicy) -> None:
    """Shard a model in place; the ranks of `mesh` then run forward and backward passes together.

    Args:
        model: equal on all ranks, on any device including meta. Its forward pass must read replicated parameters, which
            become DTensors, with `local_part`.
        mesh: one-dimensional mesh of the ranks that process the same samples.
        policy: precision policy; parameters that it excludes from FSDP2 are excluded here too.

    Raises:
        ConfigError: the model has no plan, or one that cannot be applied with this number of ranks.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    if hook(model, "tensor_parallel_plan") is None:
        message = f"is {mesh.size()} but {type(model).__name__} has no tensor_parallel_plan(); set it to 1"
        raise ConfigError(Violation(_KEY, message))
    if violations := list(_violations(model, mesh.size())):
        raise ConfigError(violations)
    in_blocks = {parameter for block in find_blocks(model) for parameter in block.parameters()}
    dims, styles = divided_dims(model), dict[str, ParallelStyle]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in dims and not policy.is_replicated(parameter, in_block=parameter in in_blocks):
                # A DTensor too, so that an optimizer gets tensors of one mesh, and each is counted and written once.
                _distribute(module, name, mesh, Replicate())
    for name, module, split in _planned(model):
        match split:
            case Split.input:
                module.register_forward_pre_hook(partial(_share_input, mesh))
            case Split.vocabulary:
                _distribute(module, "weight", mesh, Shard(0))
                if isinstance(module, nn.Embedding):
                    module.forward = partial(embed_divided, module)  # type: ignore[method-assign]
            case Split.columns if isinstance(module, nn.Embedding):
                _distribute(module, "weight", mesh, Shard(1))
                module.forward = partial(embed_columns, module)  # type: ignore[method-assign]
            case Split.columns:
                styles[name] = ColwiseParallel()
            case Split.rows:
                styles[name] = RowwiseParallel()
    parallelize_module(model, mesh, styles, src_data_rank=None)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: "Placement") -> None:
    from torch.distributed.tensor import distribute_tensor

    parameter = module.get_parameter(name)
    data = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(data, requires_grad=parameter.requires_grad))


def _share_input(mesh: DeviceMesh, module: nn.Module, args: Sequence[Any]) -> tuple[Any, ...]:
    """Forward pre-hook that turns the input into a replicated DTensor.

    The layers inside use this DTensor directly. In the backward pass, this hook sums the gradient of the
    input over the ranks, once for all of these layers.
    """
    from torch.distributed.tensor import DTensor, Replicate

    first, *rest = args
    return DTensor.from_local(first, mesh, [Replicate()], run_check=False), *rest


def _planned(model: nn.Module) -> Iterator[tuple[str, nn.Module, Split]]:
    """Yield name, module and split of each module that a pattern of the model's plan matches, in model order."""
    get_plan = hook(model, "tensor_parallel_plan")
    plan: dict[str, Split] = {} if get_plan is None else get_plan()
    for name, module in model.named_modules():
        for pattern, split in plan.items():
            if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                yield name, module, split


def _is_by_feature(module: nn.Module, split: Split) -> bool:
    """Return whether an embedding, (vocab, features), is sharded by its features."""
    return split is Split.columns and isinstance(module, nn.Embedding)


def _violations(model: nn.Module, num_ranks: int) -> Iterator[Violation]:
    first: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := first.setdefault(parameter, name)) != name:
            yield Violation(_KEY, f"is {num_ranks} but {name} and {other} share one parameter; set it to 1")
    dims = divided_dims(model)
    for name, module, split in _planned(model):
        if split is Split.input:
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)) or getattr(module, "bias", None) is not None:
            message = f"is {num_ranks} but {name} is neither an embedding nor a linear layer without bias; set it to 1"
            yield Violation(_KEY, message)
        elif (size := module.weight.shape[dims[module.weight]]) % num_ranks:
            yield Violation(_KEY, f"is {num_ranks} but must divide the {size} {split.value} of {name}")
