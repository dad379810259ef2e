"""Initial weights of transformers: normal, with smaller ones where a block adds to the residual stream."""

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
"""Gives a model, wrapped or not, the weights that it starts with; of a sharded one each rank's own part."""

_OUTPUT = re.compile(
    r"^(?!.*norm)(.*\.)?("
    r"o_proj|out_proj|c_proj|down_proj|output_linear|dense_4h_to_h|fc2|fc_out|w2|Wo"  # of their own name
    r"|\w*att\w*\.dense|output\.dense"  # named by where they are: BLOOM, Falcon, GPT-NeoX, Phi; BERT
    r")$"
)
"""Matrices whose product a block adds to the residual stream, by their path within the block."""


@dataclass(frozen=True)
class InitialModel:
    """A model as it was built, and the weights that it starts with.

    Attributes:
        model: not wrapped; its matrices may be on the meta device, and then have no numbers.
        fill: gives it its weights once it is where it trains; None: it has them, or nobody asks for them.
    """

    model: nn.Module
    fill: Fill | None = None

    def whole(self) -> nn.Module:
        """The model with its weights, in host memory."""
        allocate(self.model.parameters(), "cpu")
        if self.fill is not None:
            self.fill(self.model)
        return self.model


def resolve_std(std: float | str, hidden_size: int) -> float:
    """The standard deviation that a number or a rule's name stands for.

    Args:
        std: the number, or `small`: sqrt(2 / (5 hidden_size)), or `wang`: sqrt(1 / (3 hidden_size)).
        hidden_size: width of the residual stream.

    Raises:
        ValueError: it is neither.
    """
    parsed = parse_std(str(std))
    return parsed(hidden_size) if callable(parsed) else parsed


def output_std(std: float, num_layers: int) -> float:
    """Standard deviation of matrices that add to the residual stream, which 2 num_layers of them share.

    GPT-2 (Radford et al., 2019, section 2.3), as `scaled_init_method_normal` of Megatron-LM computes it.
    """
    return std / math.sqrt(2.0 * num_layers)


def matrix_draws(model: nn.Module, *, std: float, embedding_std: float) -> dict[str, Draw]:
    """How a transformer's weights are drawn, by name.

    Matrices are N(0, std), except `output_std` where a block adds to the residual stream and N(0, embedding_std) in
    embeddings, whose padding row is zero. A head tied to an embedding is one. Biases are zero; norms keep theirs.

    Args:
        model: its blocks are those of `find_blocks`; on any device, also meta, and with fake tensors.
        std: standard deviation of a matrix.
        embedding_std: standard deviation of embeddings of tokens and positions.

    Raises:
        ConfigError: a parameter is of an unknown kind, or a block's output projections are not to be found.
    """
    blocks = list(find_blocks(model))
    outputs = _output_projections(blocks)
    embeddings = {module.weight: module.padding_idx for module in model.modules() if isinstance(module, nn.Embedding)}
    _check_known(model, embeddings)
    draws: dict[str, Draw] = {}
    for name, parameter in model.named_parameters():
        if parameter in embeddings:
            draws[name] = Normal(embedding_std, zero_row=embeddings[parameter])
        elif name.endswith("bias"):
            draws[name] = Constant(0.0)
        elif parameter.ndim >= 2:
            draws[name] = Normal(output_std(std, len(blocks)) if parameter in outputs else std)
    return draws


def draw_weights(model: nn.Module, draws: Mapping[str, Draw], seed: int | None = None) -> None:
    """Draw the weights of a model that is not wrapped.

    Args:
        model: parameters without numbers, on the meta device or fake, are left so.
        draws: by the parameter's name.
        seed: that they are keyed by; None: one that torch's generator gives, so that `torch.manual_seed` decides.
    """
    named = model.named_parameters()
    parts = {name: Part.whole(p) for name, p in named if not p.is_meta and not is_fake(p)}
    if parts:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if seed is None else seed
        draw_parts(draws, parts, seed)


class _Undrawn(TorchFunctionMode):
    """Draws nothing on the meta device: torch 2.13 draws normal numbers there in Python, and imports its compiler."""

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
    """Have modules that are built in the body keep no numbers of their matrices, which nothing then fills.

    Vectors and buffers are as their constructors make them: they are small, and only constructors know them. Whoever
    shares a parameter still does: the tensor itself is exchanged.
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
    """Give parameters on the meta device memory, which nothing has filled; in place, others are left as they are."""
    for parameter in parameters:
        if parameter.is_meta:
            _exchange(parameter, device)


def _exchange(parameter: nn.Parameter, device: torch.device | str) -> None:
    """Have the same parameter be on another device, without its numbers, for whoever holds it."""
    if is_sharded(parameter):
        empty = torch.empty_like(parameter, device=device)
    else:  # of a tensor on the meta device `empty_like` is Python, and imports sympy
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    other = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


def _output_projections(blocks: Sequence[nn.Module]) -> set[Tensor]:
    """The parameters of the blocks that add to the residual stream: attention's and the feed-forward's of each."""
    outputs = set[Tensor]()
    for block in blocks:
        matrices = {name: p for name, p in block.named_parameters() if p.ndim >= 2 and not name.endswith("bias")}
        found = {p for name, p in matrices.items() if _OUTPUT.match(name.removesuffix(".weight"))}
        if len(found) < 2:
            message = (
                f"needs to know which matrices of a {type(block).__name__} add to the residual stream, and does not "
                f"among {', '.join(matrices)}; set it to null for the architecture's own initialisation"
            )
            raise ConfigError(Violation("model.init_std", message))
        outputs |= found
    return outputs


def _check_known(model: nn.Module, embeddings: dict[Tensor, int | None]) -> None:
    """Refuse parameters that mean something else than a matrix, such as convolutions, decays and fixed sinusoids."""
    convolved = {p for module in model.modules() if isinstance(module, _ConvNd) for p in module.parameters()}
    unknown = [
        name
        for name, p in model.named_parameters()
        if p in convolved
        or (not p.requires_grad and not name.endswith("bias"))
        or (p.ndim >= 2 and p not in embeddings and not name.endswith((".weight", "_proj", "bias")))
    ]
    if unknown:
        message = (
            f"has no rule for {unknown[0]} and {len(unknown) - 1} more; "
            "set it to null for the architecture's own initialisation"
        )
        raise ConfigError(Violation("model.init_std", message))
