"""Initial weights of transformers: normal, with smaller ones where a block adds to the residual stream."""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from foundry.config.errors import ConfigError, Violation
from foundry.config.init_std import parse_std
from foundry.models.fsdp_block import find_blocks

_OUTPUT = re.compile(
    r"^(?!.*norm)(.*\.)?("
    r"o_proj|out_proj|c_proj|down_proj|output_linear|dense_4h_to_h|fc2|fc_out|w2|Wo"  # of their own name
    r"|\w*att\w*\.dense|output\.dense"  # named by where they are: BLOOM, Falcon, GPT-NeoX, Phi; BERT
    r")$"
)
"""Matrices whose product a block adds to the residual stream, by their path within the block."""


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


@torch.no_grad()
def draw_weights(model: nn.Module, *, std: float, embedding_std: float) -> None:
    """Draw a transformer's weights from scratch, in the order of its parameters.

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
    for name, parameter in model.named_parameters():
        if parameter in embeddings:
            parameter.normal_(0.0, embedding_std)
            if (padding := embeddings[parameter]) is not None:
                parameter[padding].zero_()
        elif name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim >= 2:
            parameter.normal_(0.0, output_std(std, len(blocks)) if parameter in outputs else std)


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
