"""Options of other config groups that data with recorded episodes chooses."""

from collections.abc import Mapping

from foundry.core.tasks import SelectedOptions
from foundry.tasks.robots.schemas.data import Demonstrations, LeRobot

_PRESETS = ("policy", "vla")
"""Options of `hparams` that choose a simulator for `data=demonstrations`."""


def implied_options(choices: SelectedOptions) -> Mapping[str, str]:
    """Return `simulator=none` and `evaluation=default` if recorded data is combined with a simulator's preset.

    An evaluation that the user chose stays; if the user chose the simulator, the result is empty.
    """
    is_recorded = choices.data is LeRobot or (choices.is_implied and choices.data is not Demonstrations)
    is_free = choices.is_free
    if choices.hparams not in _PRESETS or not is_recorded or is_free("data") or not is_free("simulator"):
        return {}
    return {"simulator": "none"} | ({"evaluation": "default"} if is_free("evaluation") else {})
