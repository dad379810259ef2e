"""Description of the value that OmegaConf expects, derived from its exceptions."""

import re
from enum import Enum

from omegaconf import EnumNode

_KINDS = {
    "integer": "a whole number",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "boolean": "true or false",
    "string": "a string",
    "str": "a string",
}
_CONTAINERS = {
    r"Cannot assign \w+ to Dict|is not a subclass of Dict": "a mapping",
    r"Cannot assign \w+ to List|Invalid value assigned: \w+ is not a ListConfig": "a list",
}
_MESSAGES = (
    r"could not be converted to (\w+)",
    r"is not a valid (\w+)",
    r"Cannot convert '\w+' to (\w+)",
    r"is not a subclass of (str|int|float|bool)\b",
    r"type hint '.*Union\[([^\]]*)\]",
)


def expected_kind(error: Exception) -> str | None:
    """Return in words the kind of value that a setting takes; None if the error does not tell it."""
    if names := accepted_options(error):
        return f"one of {', '.join(names)}"
    if isinstance(error, OverflowError):
        return "a number within the range of a float"
    for pattern, kind in _CONTAINERS.items():
        if re.search(pattern, str(error)):
            return kind
    for pattern in _MESSAGES:
        if match := re.search(pattern, str(error)):
            # Sorted, because Python caches a union by its members: its order is that of the first one created.
            return " or ".join(sorted({_KINDS.get(name, name) for name in match[1].lower().split(", ")}))
    return None


def accepted_options(error: Exception) -> list[str]:
    """Return the member names of the enumeration that a setting takes; empty if the error is not about one."""
    if match := re.search(r"expected one of \[(.*)\]", str(error)):
        return [name.strip() for name in match[1].split(",")]
    node = getattr(error, "child_node", None)
    kind = node.enum_type if isinstance(node, EnumNode) else None
    if kind is None and (match := re.search(r"<enum '(\w+)'>", str(error))):
        kind = next((enumeration for enumeration in Enum.__subclasses__() if enumeration.__name__ == match[1]), None)
    return [member.name for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
