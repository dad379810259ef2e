"""Interfaces of policies."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from foundry.core.protocols import Microbatch


@runtime_checkable
class ActingObjective(Protocol):
    """An objective whose model is a policy: it predicts the next actions from observations.

    States and actions are normalized as in the data.
    """

    @property
    def action_steps(self) -> int:
        """Number of actions of a chunk that are executed before the next prediction."""
        ...

    def act(self, model: nn.Module, observation: Microbatch, keys: Tensor) -> Tensor:
        """Return the next actions, (batch, horizon, action_dim) float32.

        Args:
            model: the model in evaluation mode; each row is computed independently.
            observation: entries of the samples, without the actions.
            keys: (batch,) int64 in host memory; a row's random numbers depend on the seed and the row's key.
        """
        ...


class Observing(Protocol):
    """Optional interface of policies that compute a chunk of actions in several forward passes."""

    def observe(self, state: Tensor, **seen: Tensor) -> Any:
        """Return features of an observation that do not depend on the actions; `forward` takes them as `observed`.

        `seen` contains `images` and `instruction` if the data has them. With this method, several forward passes for
        one chunk encode the observation only once. `observe` may be called before any forward pass, with gathered
        weights. `forward` must not call `observe`, because FSDP2 gathers the weights for a call of either method.
        """
        ...
