"""Checks that read one group of a configuration only, done once for all configurations with the same group."""

from collections.abc import Hashable
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.composition.plain_nodes import check_plain_nodes
from foundry.config.diagnostics.missing_values import missing_values
from foundry.config.record.secrets import has_secret
from foundry.config.setting import check_fields
from foundry.core.errors import Violation
from foundry.run_dir.redact import known_secrets


class GroupCheck:
    """Typed settings and violations of one group, without the rules that also read other groups.

    Each attribute is computed when it is first read.
    """

    def __init__(self, composed: DictConfig, name: str) -> None:
        self._composed = composed
        self._name = name

    @cached_property
    def missing(self) -> list[Violation]:
        """Errors of values that are missing, cannot be resolved, or are not in a schema."""
        return list(missing_values(self._composed, self._name, self._name))

    @cached_property
    def settings(self) -> Any:
        """The group as a frozen dataclass, or as plain containers for a part of the user; needs an empty `missing`.

        Raises:
            omegaconf.errors.OmegaConfBaseException: a part of the user has an invalid value.
        """
        return OmegaConf.to_object(self._composed[self._name])

    @cached_property
    def out_of_bounds(self) -> list[Violation]:
        """Errors of typed fields, or of a part of the user that is no mapping with a `_target_`."""
        if is_dataclass(self.settings):
            return list(check_fields(self.settings, self._name))
        if not isinstance(self.settings, dict) or "_target_" not in self.settings:
            return [Violation(self._name, "must be a mapping with a _target_: choose an option of the group")]
        return []

    @cached_property
    def in_plain_nodes(self) -> list[Violation]:
        """Errors of built-in parts in plain mappings."""
        return list(check_plain_nodes(self.settings, self._name))

    @cached_property
    def has_secret(self) -> bool:
        """Whether a setting is a secret, apart from references to other settings."""
        return has_secret(self._composed, self._name)


class GroupChecks:
    """Cache of the checks of groups, for configurations that differ in a few settings, such as the jobs of a sweep."""

    def __init__(self) -> None:
        self._checks: dict[Hashable, GroupCheck] = {}

    def check(self, composed: DictConfig, name: str) -> GroupCheck:
        """Return the check of a group, from the cache if an earlier configuration had the same group.

        The check of a group depends on its settings, on the values of the settings that it refers to, and on the
        secrets to mask in messages. A group with an interpolation that cannot be resolved, or that resolves to a
        container, is checked anew.
        """
        content: list[Hashable] = []
        try:
            _content(composed, name, composed._get_node(name), content)
        except (OmegaConfBaseException, _ContainerReferenceError):
            return GroupCheck(composed, name)
        return self._checks.setdefault((*content, len(known_secrets())), GroupCheck(composed, name))


class _ContainerReferenceError(Exception):
    """Raised if an interpolation resolves to a container."""


def _content(parent: DictConfig | ListConfig, key: Any, node: Any, content: list[Hashable]) -> None:
    """Append the types and values of a node and of the nodes below it, in the order of the configuration.

    A value is its `repr`, which differs between 1, 1.0, "1" and true, and between 0.0 and -0.0.

    Args:
        parent: parent of the node.
        key: key of the node in `parent`.
        node: the node.
        content: list to append to.
    """
    value = node._content if isinstance(node, (DictConfig, ListConfig)) else node._value()
    content.append(key)
    if isinstance(value, (dict, list)):
        content += node._metadata.object_type, len(value)
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            _content(node, name, child, content)
    elif isinstance(value, str) and "${" in value:
        resolved = parent[key]
        if isinstance(resolved, Container):
            raise _ContainerReferenceError
        content += value, node._metadata.ref_type, repr(resolved)
    else:
        content.append(repr(value))
