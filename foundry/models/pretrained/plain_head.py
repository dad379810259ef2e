"""Check whether a model's logits are just the product of hidden states and a matrix."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import MoeModelOutputWithPast

_VIEWS = frozenset(
    {"alias", "detach", "device", "expand", "slice", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"}
)
"""Operators that compute nothing; `device` is recorded because fake tensors are queried for it."""


class _Seen(TorchDispatchMode):
    """Records the names of the called operators while `is_on`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_on:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Hidden(MoeModelOutputWithPast):
    """Output of a base model with hidden states only; every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def has_plain_head(causal_lm: Any) -> bool:
    """Return whether the logits are just the product of the last hidden states and the head's matrix.

    Some architectures scale or cap the logits, add a bias, or insert another projection. The check runs the model with
    a stand-in for its base model, and records the operators that follow, so it works for a model of any size and for
    models without values.

    Args:
        causal_lm: a causal language model of transformers.
    """
    head: Any = causal_lm.get_output_embeddings()
    base, kind = causal_lm.base_model, type(head)
    if kind is not nn.Linear or head.bias is not None or base is causal_lm:
        return False
    seen, hidden = _Seen(), head.weight.new_zeros(1, 1, head.in_features)

    def stand_in(*args: Any, **kwargs: Any) -> _Hidden:
        seen.is_on = True
        return _Hidden(last_hidden_state=hidden)

    tokens = torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
    base.forward = stand_in
    try:
        with torch.no_grad(), seen:
            causal_lm(input_ids=tokens, use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # the head needs more inputs
        return False
    finally:
        del base.forward
    return [name for name in seen.names if name not in _VIEWS] == ["mm"]
