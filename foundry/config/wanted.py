"""What OmegaConf would have taken where it refuses a value, from its errors."""

import re
from enum import Enum

_KINDS = {
    "integer": "a whole number",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "boolean": "true or false",
    "string": "a text",
    "str": "a text",
}
_MESSAGES = (
    r"could not be converted to (\w+)",
    r"is not a valid (\w+)",
    r"Cannot convert '\w+' to (\w+)",
    r"type hint '.*Union\[([^\]]*)\]",
)


def wanted(error: Exception) -> str | None:
    """The kind of value in words; None where the error is about something else."""
    if names := options_of(error):
        return f"one of {', '.join(names)}"
    if isinstance(error, OverflowError):
        return "a number that a float holds"
    for pattern in _MESSAGES:
        if found := re.search(pattern, str(error)):
            return " or ".join(dict.fromkeys(_KINDS.get(name, name) for name in found[1].lower().split(", ")))
    return None


def options_of(error: Exception) -> list[str]:
    """The names of the enumeration, where it takes one."""
    if found := re.search(r"expected one of \[(.*)\]", str(error)):
        return [name.strip() for name in found[1].split(",")]
    kind = getattr(getattr(error, "child_node", None), "enum_type", None)
    if kind is None and (found := re.search(r"<enum '(\w+)'>", str(error))):
        kind = next((known for known in Enum.__subclasses__() if known.__name__ == found[1]), None)
    return [member.name for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
