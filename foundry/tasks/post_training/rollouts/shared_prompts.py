"""Microbatches with shared prompts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Microbatch
from foundry.models.attention.branches import takes_branches
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.tasks.post_training.protocols import RolloutObjective

_KEY = "objective.share_prompts"


def resolve_sharing(objective: RolloutObjective, model: nn.Module, *, is_compiled: bool) -> bool:
    """Return whether updates compute the tokens of a prompt once for all of its completions.

    Args:
        objective: the loss; if its setting `share_prompts` is None, prompts are shared if possible.
        model: the trained model.
        is_compiled: whether the blocks of the model are compiled, which would repeat for each layout.

    Raises:
        ConfigError: the setting is true, but the objective or the model does not support it.
    """
    setting = objective.rollouts.share_prompts
    if setting is False:
        return False
    problem = _find_problem(objective, model)
    if problem is None:
        return not is_compiled
    if setting:
        raise ConfigError(Violation(_KEY, f"is true but {problem}; set it to false"))
    return False


def _find_problem(objective: RolloutObjective, model: nn.Module) -> str | None:
    """Return the reason why the objective or the model does not support shared prompts; None if both do."""
    # The overridden loss of a subclass may call the model without the layout of the row.
    owner = next(kind for kind in type(objective).__mro__ if "loss" in vars(kind))
    if "shares_prompts" not in vars(owner):
        return f"{owner.__name__} defines loss() without shares_prompts"
    if not objective.shares_prompts:
        return f"{type(objective).__name__}.shares_prompts is False"
    if not takes_branches(model):
        return f"the forward() of {type(model).__name__} does not take branches"
    return None


def share_prompts(samples: Mapping[str, Tensor], numbers: Sequence[int], groups: Tensor) -> Microbatch:
    """Return completions as one row: the prompt of each group, then each completion with the rest of its prompt.

    The completions of a group share their common tokens before the first target, which are all tokens of the prompt but
    the last.

    Args:
        samples: `tokens` and `targets`, (completions, seq) int64, `length`, (completions,) int64, and further columns.
        numbers: row numbers of the completions, ascending, at least one.
        groups: (completions,) int64, equal for completions of the same prompt, which are adjacent.

    Returns:
        `tokens` and `targets`: (1, tokens). `documents`: (1, tokens), index of the completion; -1 for shared tokens.
        `prefix_lengths` and `branches`: layout of the row, as for `Branches`. Other columns have a row for each
        completion; if they have a value for each token, it begins with the first token that is not shared.
    """
    rows = torch.tensor(numbers)
    tokens, targets, lengths, groups = (
        t[rows] for t in (samples["tokens"], samples["targets"], samples["length"], groups)
    )
    columns = torch.arange(tokens.shape[1])
    prefix, firsts = _find_groups(groups)
    is_common = (tokens == tokens[firsts][prefix]) & (targets == IGNORED_TARGET) & (columns < lengths[:, None] - 1)
    prefix_lengths = torch.full((len(firsts),), len(columns)).scatter_reduce_(
        0, prefix, is_common.cumprod(1).sum(1), "amin"
    )
    starts = prefix_lengths[prefix]
    is_shared = columns < prefix_lengths[:, None]
    is_own = (columns >= starts[:, None]) & (columns < lengths[:, None])
    shared, own = tokens[firsts][is_shared], tokens[is_own]
    documents = torch.arange(len(rows))[:, None].expand_as(tokens)[is_own]
    own_lengths = lengths - starts
    places = torch.arange(int(own_lengths.max()))
    index, is_past = (starts[:, None] + places).clamp(max=len(columns) - 1), places >= own_lengths[:, None]

    def select(column: Tensor) -> Tensor:
        if column.dim() == 1:
            return column[rows]
        values = column[rows[:, None], index]
        return values.masked_fill(is_past.view(*is_past.shape, *[1] * (values.dim() - 2)), 0)

    return {
        **{name: select(column) for name, column in samples.items() if name not in ("tokens", "targets", "length")},
        "tokens": torch.cat((shared, own))[None],
        "targets": torch.cat((torch.full_like(shared, IGNORED_TARGET), targets[is_own]))[None],
        "documents": torch.cat((torch.full_like(shared, -1), documents))[None],
        "prefix_lengths": prefix_lengths,
        "branches": torch.stack((prefix, own_lengths), dim=1),
    }


def restore_columns(columns: Mapping[str, Tensor], microbatch: Microbatch, *, width: int) -> dict[str, Tensor]:
    """Return values of a row from `share_prompts` as values of separate rows; shared tokens get 0.

    Args:
        columns: (completions, seq) by name, beginning with the first token that is not shared.
        microbatch: the row.
        width: tokens of the longest completion with its prompt.

    Returns:
        (completions, width) by name.
    """
    prefixes, own_lengths = microbatch["branches"].unbind(1)
    starts = microbatch["prefix_lengths"][prefixes]
    places = torch.arange(int(own_lengths.max()))
    rows, own = (places < own_lengths[:, None]).nonzero().unbind(1)
    restored = dict[str, Tensor]()
    for name, column in columns.items():
        restored[name] = column.new_zeros(len(column), width)
        restored[name][rows, starts[rows] + own] = column[rows, own]
    return restored


def _find_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each completion's group, (completions,), and the first completion of each, (groups,)."""
    is_first = torch.ones_like(groups, dtype=torch.bool)
    is_first[1:] = groups[1:] != groups[:-1]
    return is_first.cumsum(0) - 1, is_first.nonzero()[:, 0]
