"""The other commands' `key=value` words: the same grammar, types and errors as a run's."""

import sys
from collections.abc import Callable
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from enum import Enum
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.errors import ConfigError, Violation, nearest
from foundry.config.mistakes import explain_value
from foundry.config.setting import check_fields

Options = TypeVar("Options")


def command(schema: type[Options], run: Callable[[Options], object], *, name: str, doc: str) -> None:
    """Run a command with the words after its name; exit code 2 and a line for each mistake in them.

    Args:
        schema: the options as a frozen dataclass of `setting`s.
        run: takes them, typed.
        name: as typed, for the help.
        doc: what it does, for the help.
    """
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.stdout.write(_help(schema, name, doc))
        return
    try:
        run(parse_options(schema, words))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


def parse_options(schema: type[Options], words: list[str]) -> Options:
    """Read `key=value` words.

    Raises:
        ConfigError: with every mistake in them.
    """
    options, violations = OmegaConf.structured(schema), list[Violation]()
    OmegaConf.set_readonly(options, None)
    OmegaConf.set_struct(options, True)
    names = [item.name for item in fields(schema)]  # type: ignore[arg-type] # a dataclass, by contract
    for word in words:
        try:
            override = OverridesParser.create().parse_overrides([word])[0]
        except HydraException:
            violations.append(Violation(word, "is not of the form key=value; quote values that hold spaces or commas"))
            continue
        if override.key_or_group not in names:
            hint = nearest(override.key_or_group, names)
            violations.append(Violation(override.key_or_group, f"is no option{hint} (options: {', '.join(names)})"))
            continue
        try:
            OmegaConf.update(options, override.key_or_group, override.value())
        except OmegaConfBaseException as error:
            violations.append(explain_value(override, str(error)))
    wrong = {violation.key for violation in violations}
    missing = sorted(OmegaConf.missing_keys(options) - wrong)
    violations += [Violation(key, f"has no value; give it as {key}=...") for key in missing]
    if violations:
        raise ConfigError(violations)
    result = OmegaConf.to_object(options)
    if violations := list(check_fields(result, "")):
        raise ConfigError(violations)
    assert isinstance(result, schema)
    return result


def _help(schema: type[Options], name: str, doc: str) -> str:
    lines = [f"python -m {name} key=value ...", "", doc, ""]
    for item in fields(schema):  # type: ignore[arg-type]
        value = item.default.name if isinstance(item.default, Enum) else item.default
        default = "required" if value in ("???", NO_DEFAULT) else f"default {value}"
        lines.append(f"  {item.name:<16} {item.metadata.get('doc', '')} ({default})")
    return "\n".join(lines) + "\n"
