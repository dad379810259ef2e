"""Commands that accept all options of a run, and with a prefix the command's options."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from foundry.commands.train import enter, in_run_dir
from foundry.config.checks.method import log_method
from foundry.config.command import (
    Outcome,
    answer_help,
    facts_alone,
    help_text,
    output_may_close,
    parse_options,
    print_facts,
    take_json,
)
from foundry.config.composition.compose import CONFIG_NAME, config_dir
from foundry.config.composition.hydra_versions import hydra_main
from foundry.config.composition.store import GROUPS
from foundry.config.schemas.root import Config, to_config
from foundry.core.errors import ConfigError

Options = TypeVar("Options")


def run_composed(
    schema: type[Options],
    work: Callable[[Config, Options, Path], Outcome | None],
    *,
    name: str,
    doc: str,
    overrides_of: Callable[[Options], list[str]] | None = None,
) -> None:
    """Run a composed command with the arguments after its name; errors and exit codes are the same as for a run.

    Args:
        schema: frozen dataclass of `setting`s with the command's own options, which are typed as `plan.every` for
            `foundry.plan`, or as `every` if no config group has that name.
        work: called with the composed configuration, the command's own options, and a new run directory; returns None
            on ranks above 0.
        name: name of the command, for the help page.
        doc: description of the command, for the help page.
        overrides_of: returns the overrides of the run that the command's own options imply; they follow the overrides
            of the command line. It may raise a ConfigError, whose keys have no prefix.
    """
    prefix = name.rpartition(".")[2] + "."
    names = {option.name for option in fields(schema)}  # type: ignore[arg-type]
    unprefixed = names.difference(GROUPS)
    prefixed = f", except for {' and '.join(sorted(names - unprefixed))}" if names - unprefixed else ""
    page = (
        f"{doc}\n\nAccepts all options of a run (see `python -m foundry --help`) and the options below.\n"
        f"The prefix {prefix} is optional{prefixed}."
    )
    with output_may_close():
        if answer_help(sys.argv[1:], lambda: help_text(schema, name, page, prefix=prefix)):
            return
    words, as_json = take_json(sys.argv[1:])
    own_options, sys.argv[1:] = split_options(schema, prefix, words)

    def task() -> None:
        try:
            options = parse_options(schema, own_options)
            sys.argv += [] if overrides_of is None else overrides_of(options)
        except ConfigError as error:
            raise ConfigError(
                replace(violation, key=prefix + violation.key) for violation in error.violations
            ) from None

        @hydra_main(config_path=config_dir(), config_name=CONFIG_NAME)
        def compose_and_work(composed: DictConfig) -> None:
            outcomes.append(in_run_dir(partial(_run_work, composed, work, options)))

        outcomes = list[Outcome | None]()
        with facts_alone() if as_json else nullcontext():
            compose_and_work()
        for outcome in filter(None, outcomes if as_json else ()):
            print_facts(outcome.facts)

    enter(task, options={*unprefixed, *(prefix + option for option in names)})


def split_options(schema: type[Any], prefix: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own options among the arguments, without the prefix, and the remaining arguments."""
    unprefixed = {option.name for option in fields(schema)}.difference(GROUPS)
    own_options = [word for word in words if word.startswith(prefix) or word.partition("=")[0] in unprefixed]
    return [word.removeprefix(prefix) for word in own_options], [word for word in words if word not in own_options]


def _run_work(
    composed: DictConfig, work: Callable[[Config, Options, Path], Outcome | None], options: Options, run_dir: Path
) -> Outcome | None:
    log_method(composed)
    return work(to_config(composed), options, run_dir)
