"""Options that are chosen together with other options, such as the hyperparameters of a training method.

Hydra cannot express such a choice. Presets such as `hparams=policy` choose the objective, the objective chooses
`hparams`, and a defaults list is processed in one order. An option chosen by interpolation cannot override other groups
and needs a file for every objective, including the user's objectives.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from foundry.config.composition.hydra_internals import ChosenOptions, IConfigRepository
from foundry.config.composition.store import group_schemas
from foundry.config.schemas.model import Base
from foundry.core.tasks import SelectedOptions, option_functions

DEFAULT_HPARAMS = "llm"
"""Default option of `hparams` in config.yaml; replaced by the option that belongs to the training method."""


def implied_options(choices: ChosenOptions) -> Mapping[str, str]:
    """Return the options that the chosen options bring with them, by group, without groups that the user has chosen."""
    options = choices.options
    if not {"hparams", "objective", "data", "model", "simulator", "evaluation"} <= options.keys():
        return {}
    method_hparams, _ = hparams_of_method(choices.repo, options)
    data = option_schema(choices.repo, "data", options["data"])
    implied: dict[str, str] = {}
    if method_hparams is not None and options["hparams"] == DEFAULT_HPARAMS and "hparams" not in choices.chosen_by:
        implied["hparams"] = method_hparams

    def is_free(group: str) -> bool:
        return group not in choices.chosen_by or str(choices.chosen_by[group]).startswith("hparams/")

    for options_of_task in option_functions():
        implied |= options_of_task(SelectedOptions(method_hparams, data, "hparams" in implied, is_free))
    return implied


def hparams_of_method(repo: IConfigRepository, options: Mapping[str, str | None]) -> tuple[str | None, str]:
    """Return the option of `hparams` that belongs to the chosen options, and the group whose option declares it.

    The schema of an option declares `implies_hparams`. A new model takes precedence over the data, and the data over
    the objective. A base model comes last, since every method can train it. Without a declaration: None and "".

    Args:
        repo: the folders of options.
        options: the chosen option of each group.
    """
    schemas = {group: option_schema(repo, group, options[group]) for group in ("model", "data", "objective")}
    is_base = schemas["model"] is not None and issubclass(schemas["model"], Base)
    order = ("data", "objective", "model") if is_base else ("model", "data", "objective")
    declarations = ((getattr(schemas[group], "implies_hparams", None), group) for group in order)
    return next((declaration for declaration in declarations if declaration[0] is not None), (None, ""))


def option_schema(repo: IConfigRepository, group: str, option: str | None) -> type[Any] | None:
    """Return the schema of an option, following the options that it extends; None if it has no schema."""
    loaded = repo.load_config(f"{group}/{option}") if isinstance(option, str) else None
    names = [name for entry in (loaded and loaded.defaults_list) or () if (name := entry.get_name()) is not None]
    for name in names:
        if (schema := _schemas(group).get(name.rpartition("/")[2])) is not None:
            return schema
    parents = [name for name in names if "/" not in name and name not in ("_self_", option)]
    return next((schema for name in parents if (schema := option_schema(repo, group, name)) is not None), None)


@cache
def _schemas(group: str) -> Mapping[str, type[Any]]:
    return group_schemas(group)
