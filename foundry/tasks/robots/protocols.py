"""Interfaces of policies."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from foundry.core.protocols import Microbatch


@runtime_checkable
class ActingObjective(Protocol):
    """An objective whose model is a policy: it sees what was observed and answers with the next actions.

    All units are those of the data, where states and actions are normalised.
    """

    @property
    def action_steps(self) -> int:
        """How many actions of a chunk are carried out before the model is asked again."""
        ...

    def act(self, model: nn.Module, observation: Microbatch, keys: Tensor) -> Tensor:
        """The next actions, (batch, horizon, action_dim) float32.

        Args:
            model: in evaluation mode; every row is answered by itself.
            observation: the samples' entries but for those of actions.
            keys: (batch,) int64 in host memory; what is drawn for a row is keyed by seed and key.
        """
        ...


class Observing(Protocol):
    """An optional method of a policy, which answers a chunk of actions in several forward passes."""

    def observe(self, state: Tensor, **seen: Tensor) -> Any:
        """What a policy makes of an observation whatever the actions, which `forward` takes as `observed`.

        `seen` are `images` and `instruction`, where the data has them. With it an answer of several forward passes
        looks once; it may be asked before any of them, with gathered weights. `forward` itself must not call it, since
        FSDP2 gathers the weights for each.
        """
        ...
