"""Weight initialization of transformers: normal, with a smaller std for matrices that add to the residual stream."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from foundry.config.init_std import parse_std
from foundry.core.errors import ConfigError, Violation
from foundry.core.sharded import is_fake, is_sharded
from foundry.models.fsdp_block import find_blocks
from foundry.models.keyed_draws import Constant, Draw, Normal, Part, draw_parts

Fill = Callable[[nn.Module], None]
"""Function that initializes the weights of a model, wrapped or not.

On a sharded model each rank fills its own shards.
"""

_OUTPUT = re.compile(
    r"^(?!.*norm)(.*\.)?("
    r"o_proj|out_proj|c_proj|down_proj|output_linear|dense_4h_to_h|fc2|fc_out|w2|Wo"  # layers named after their role
    r"|\w*att\w*\.dense|output\.dense"  # layers named after their place: BLOOM, Falcon, GPT-NeoX, Phi; BERT
    r")$"
)
"""Matrices whose product a block adds to the residual stream, matched by their path within the block."""


@dataclass(frozen=True)
class InitialModel:
    """A newly built model, and the function that initializes it.

    Attributes:
        model: unwrapped model. Its matrices may be on the meta device and then have no values.
        fill: initializes the weights once the model is on its training device; None if the weights are initialized
            already or their values are not needed.
    """

    model: nn.Module
    fill: Fill | None = None

    def materialize(self) -> nn.Module:
        """Return the model with initialized weights, in host memory."""
        allocate(self.model.parameters(), "cpu")
        if self.fill is not None:
            self.fill(self.model)
        return self.model


def resolve_std(std: float | str, hidden_size: int) -> float:
    """Return the standard deviation that `std` specifies, as a number or as the name of a rule.

    Args:
        std: a number, `small`: sqrt(2 / (5 hidden_size)), or `wang`: sqrt(1 / (3 hidden_size)).
        hidden_size: width of the residual stream.

    Raises:
        ValueError: `std` is not a number and not the name of a rule.
    """
    parsed = parse_std(str(std))
    return parsed(hidden_size) if callable(parsed) else parsed


def output_std(std: float, num_layers: int) -> float:
    """Return the std of matrices that add to the residual stream: std / sqrt(2 num_layers).

    A model has 2 num_layers matrices of this kind. The rule is from GPT-2 (Radford et al., 2019, section 2.3), computed
    as in Megatron-LM's `scaled_init_method_normal`.
    """
    return std / math.sqrt(2.0 * num_layers)


def matrix_draws(model: nn.Module, *, std: float, embedding_std: float, zero_outputs: bool = False) -> dict[str, Draw]:
    """Return the initialization of a transformer's weights by parameter name.

    All are normal with mean 0. The standard deviation of matrices is `std`, of matrices that add to the residual stream
    `output_std`, and of embeddings `embedding_std`, with a padding row of zeros. A head tied to an embedding is
    initialized as an embedding. Biases are zero; norms are not listed and keep their values.

    Args:
        model: model on any device including meta, or of fake tensors, whose blocks `find_blocks` finds.
        std: standard deviation of a matrix.
        embedding_std: standard deviation of token and position embeddings.
        zero_outputs: matrices that add to the residual stream are zero, so that each block is the identity at the start
            (Fixup: Zhang et al., 2019, arXiv:1901.09321, section 3).

    Raises:
        ConfigError: a parameter is of an unknown kind, or the output projections of a block cannot be identified.
    """
    blocks = list(find_blocks(model))
    outputs = _output_projections(blocks)
    embeddings = {module.weight: module.padding_idx for module in model.modules() if isinstance(module, nn.Embedding)}
    _check_coverage(model, embeddings)
    draws: dict[str, Draw] = {}
    output: Draw = Constant(0.0) if zero_outputs else Normal(output_std(std, len(blocks)))
    for name, parameter in model.named_parameters():
        if parameter in embeddings:
            draws[name] = Normal(embedding_std, zero_row=embeddings[parameter])
        elif name.endswith("bias"):
            draws[name] = Constant(0.0)
        elif parameter.ndim >= 2:
            draws[name] = output if parameter in outputs else Normal(std)
    return draws


def draw_weights(model: nn.Module, draws: Mapping[str, Draw], seed: int | None = None) -> None:
    """Initialize the weights of an unwrapped model.

    Args:
        model: parameters on the meta device and fake tensors are skipped.
        draws: initialization by parameter name.
        seed: seed of the values; None takes one from torch's default generator, so that `torch.manual_seed` determines
            the weights.
    """
    parameters = model.named_parameters()
    parts = {name: Part.from_tensor(p) for name, p in parameters if not p.is_meta and not is_fake(p)}
    if parts:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if seed is None else seed
        draw_parts(draws, parts, seed)


class _Undrawn(TorchFunctionMode):
    """Skips initializers on the meta device, where torch 2.13 runs normal_() in Python and imports its compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.normal_ or getattr(func, "__module__", None) == nn.init.__name__:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def matrices_on_meta() -> Iterator[None]:
    """Put the matrices of modules that are built inside the context on the meta device.

    These matrices have no values; the caller allocates and fills them (see `InitialModel`).

    Vectors and buffers keep the values assigned by their constructors: they are small, and only the constructors can
    compute them. Shared parameters stay shared, because the tensor itself is swapped.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if type(param) is nn.Parameter and param.ndim >= 2 and not param.is_meta:
            _exchange(param, "meta")

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with _Undrawn():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate(parameters: Iterable[nn.Parameter], device: torch.device | str) -> None:
    """Move parameters from the meta device to uninitialized memory, in place; other parameters are not changed."""
    for parameter in parameters:
        if parameter.is_meta:
            _exchange(parameter, device)


def _exchange(parameter: nn.Parameter, device: torch.device | str) -> None:
    """Move a parameter to another device without its values, in place, so that all references to it stay valid."""
    if is_sharded(parameter):
        empty = torch.empty_like(parameter, device=device)
    else:  # on the meta device `empty_like` is implemented in Python and imports sympy
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    other = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


def _output_projections(blocks: Sequence[nn.Module]) -> set[Tensor]:
    """Return the parameters that add to the residual stream: the output projections of attention and feed-forward."""
    outputs = set[Tensor]()
    for block in blocks:
        matrices = {name: p for name, p in block.named_parameters() if p.ndim >= 2 and not name.endswith("bias")}
        block_outputs = {p for name, p in matrices.items() if _OUTPUT.match(name.removesuffix(".weight"))}
        if len(block_outputs) < 2:
            message = (
                f"requires known names for the matrices of a {type(block).__name__} that add to the residual stream; "
                f"found {', '.join(matrices)}; set it to null for the architecture's own initialization"
            )
            raise ConfigError(Violation("model.init_std", message))
        outputs |= block_outputs
    return outputs


def _check_coverage(model: nn.Module, embeddings: dict[Tensor, int | None]) -> None:
    """Raise a ConfigError for parameters that `matrix_draws` has no rule for, such as convolution weights."""
    convolution_weights = {p for module in model.modules() if isinstance(module, _ConvNd) for p in module.parameters()}
    violations = [
        name
        for name, p in model.named_parameters()
        if p in convolution_weights
        or (not p.requires_grad and not name.endswith("bias"))
        or (p.ndim >= 2 and p not in embeddings and not name.endswith((".weight", "_proj", "bias")))
    ]
    if violations:
        message = (
            f"has no rule for {violations[0]} and {len(violations) - 1} more; "
            "set it to null for the architecture's own initialization"
        )
        raise ConfigError(Violation("model.init_std", message))
