"""Options that are chosen automatically with recorded episodes."""

from collections.abc import Mapping

from foundry.core.tasks import SelectedOptions
from foundry.tasks.robots.schemas.data import Demonstrations, LeRobot

_PRESETS = ("policy", "vla")
"""Options of `hparams` that choose a simulator for `data=demonstrations`."""


def implied_options(choices: SelectedOptions) -> Mapping[str, str]:
    """Return `simulator=none` if the data does not come from the simulator that the `hparams` preset chooses."""
    is_recorded = choices.data is LeRobot or (choices.is_implied and choices.data is not Demonstrations)
    is_free = choices.is_free
    if choices.hparams not in _PRESETS or not is_recorded or is_free("data") or not is_free("simulator"):
        return {}
    return {"simulator": "none"} | ({"evaluation": "default"} if is_free("evaluation") else {})
