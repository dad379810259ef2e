"""Decorator for parts that take their settings as one object of their schema."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar, cast

from omegaconf import MISSING as MUST_BE_SET

from foundry.config.build import FOR_THE_BUILDER

R = TypeVar("R")
SETTINGS = "settings"
"""Name of the parameter that takes the object of the schema."""


def configured_by(schema: type) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a constructor or function that takes an object of `schema` as its parameter `settings`.

    Callers pass the object, `GRPO(settings)`, or its fields by keyword, `GRPO(kl_type=KLType.k1)`, as
    `hydra.utils.instantiate` does. The schema is the only declaration of fields, defaults and descriptions. A keyword
    that is a parameter of the function itself goes to that parameter, such as a model nested in another model.

    The signature of the decorated function has the fields as keyword-only parameters.

    Raises:
        TypeError: (the decorated function) if a keyword is unknown, a field without a default is missing, or the object
            is not of `schema`.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        parameters = inspect.signature(function).parameters
        settings_index = list(parameters).index(SETTINGS)
        setting_fields = [item for item in fields(schema) if _is_setting(item) and item.name not in parameters]

        @wraps(function)
        def build(*args: Any, **keywords: Any) -> R:
            if len(args) <= settings_index and SETTINGS not in keywords:
                keywords[SETTINGS] = _from_keywords(schema, setting_fields, keywords, function.__qualname__)
            settings = args[settings_index] if len(args) > settings_index else keywords[SETTINGS]
            if not isinstance(settings, schema):
                message = f"takes an object of {schema.__name__}, or its fields as keyword arguments"
                raise TypeError(f"{function.__qualname__}() {message}, not {settings!r:.100}")
            return function(*args, **keywords)

        cast(Any, build).__signature__ = inspect.Signature(
            list(_signature_parameters(parameters.values(), setting_fields))
        )
        return build

    return decorate


def from_settings() -> Any:
    """Declare a class attribute that is read from the field or property of `settings` with the same name.

    Subclasses and instances may override it.
    """
    return _FromSettings()


class _FromSettings:
    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, owner: type) -> Any:
        return self if part is None else getattr(part.settings, self._name)


def requires_value(schema: type) -> dict[str, bool]:
    """Map each field of a schema to True if a part that is built without a run needs a value for it."""
    return {item.name: _default(item) is MISSING for item in fields(schema) if _is_setting(item)}


def _is_setting(item: "Field[Any]") -> bool:
    return item.init and not item.name.startswith("_") and item.name not in FOR_THE_BUILDER


def _from_keywords(schema: type, setting_fields: list["Field[Any]"], keywords: dict[str, Any], name: str) -> Any:
    """Remove the fields of the schema from the keywords, and build an object of the schema from them.

    Raises:
        TypeError: if a field without a default is missing.
    """
    if missing := [item.name for item in setting_fields if item.name not in keywords and _default(item) is MISSING]:
        raise TypeError(f"{name}() missing required keyword argument: {', '.join(missing)}")
    arguments = {item: keywords.pop(item.name) for item in setting_fields if item.name in keywords}
    values = {item.name: _as_declared(item.default_factory, value) for item, value in arguments.items()}
    defaults = {item.name: _default(item) for item in setting_fields if item.default_factory is MISSING}
    # A schema that several parts share has no default `_target_`.
    no_target = {item.name: "" for item in fields(schema) if item.name == "_target_" and item.default is MISSING}
    return schema(**{**no_target, **defaults, **values})


def _as_declared(declared_type: Any, value: Any) -> Any:
    """Convert a mapping, as Hydra passes it for a nested dataclass, to that dataclass.

    Return other values unchanged.
    """
    if not (is_dataclass(declared_type) and isinstance(value, Mapping)):
        return value
    field_types = {item.name: item.default_factory for item in fields(declared_type)}
    return cast(Any, declared_type)(
        **{name: _as_declared(field_types.get(name), inner) for name, inner in value.items()}
    )


def _default(item: "Field[Any]") -> Any:
    """Return the default of a field outside a run.

    MISSING if a value must be set or is interpolated from another key.
    """
    if item.default_factory is not MISSING:
        return item.default_factory()
    default_without_run = item.metadata.get("alone", MISSING)
    if default_without_run is not MISSING:
        return default_without_run
    is_open = isinstance(item.default, str) and (item.default == MUST_BE_SET or "${" in item.default)
    return MISSING if is_open else item.default


def _signature_parameters(parameters: Any, setting_fields: list["Field[Any]"]) -> Iterator[Parameter]:
    """Yield the parameters of the function, with the fields of the schema in place of the parameter `settings`."""
    function_parameters = [parameter for parameter in parameters if parameter.name != SETTINGS]
    keyword_parameters = [parameter for parameter in function_parameters if parameter.kind is Parameter.VAR_KEYWORD]
    yield from (parameter for parameter in function_parameters if parameter.kind is not Parameter.VAR_KEYWORD)
    for item in setting_fields:
        default = _default(item)
        parameter_default = Parameter.empty if default is MISSING else default
        yield Parameter(item.name, Parameter.KEYWORD_ONLY, default=parameter_default, annotation=item.type)
    yield from keyword_parameters
