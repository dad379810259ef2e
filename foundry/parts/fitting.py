"""Selection of the settings that a custom part accepts."""

import inspect
import logging
from typing import Any

from hydra.utils import get_object

from foundry.config.checks.targets import runtime_settings

log = logging.getLogger(__name__)


def fitting(node: Any, group: str) -> Any:
    """Return the settings of a part; a custom part's without the optional ones that its constructor does not accept."""
    optional = [name for name in runtime_settings(group) if isinstance(node, dict) and name in node]
    if not optional:
        return node
    try:
        parameters = inspect.signature(get_object(node["_target_"]), follow_wrapped=False).parameters
    except ValueError:  # compiled code without a signature
        return node
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return node
    untaken = [name for name in optional if name not in parameters]
    for name in untaken:
        if group == "scheduler":
            log.info("scheduler.%s=%s is not used: %s does not accept it", name, node[name], node["_target_"])
    return {name: value for name, value in node.items() if name not in untaken}
