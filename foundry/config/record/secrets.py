"""Secrets in the configuration: they come from environment variables, and files record only the variable's name."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from foundry.core.errors import Violation
from foundry.run_dir.redact import MASK, is_secret, masked_text, recorded, remember

VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,\s*(?:null|''|\"\")?\s*)?\}")
"""Reference to an environment variable, which a file contains in place of a secret."""

_ANY_VARIABLE = re.compile(r"\boc\.env:\s*([A-Za-z_]\w*)")
_USER_FROM_VARIABLES = re.compile(r"(?<=://)[^/\s@:]*:?\*\*\*@")
# Settings of hydra/launcher=kubernetes that contain names of the cluster's secrets, and the pattern of these names.
_NAMES_OF_SECRETS = ("hydra.launcher.secrets", "hydra.launcher.image_pull_secrets")
_MANIFEST = "hydra.launcher.env."
_SEPARATORS = re.compile(r"\w+:\s|[\s{}\[\],'\"]+")  # and the keys of a dictionary, in an override
_NAME_OF_SECRET = re.compile(r"[a-z0-9.-]+(/[\w.-]+)?")
# Keys of the `hydra` node that users set. The remaining keys repeat these or are internal to Hydra.
_HYDRA_GROUPS = ("callbacks", "env", "job", "launcher", "run", "sweep", "sweeper")

_PRIVATE = "hydra.launcher.env_vars."
"""Prefix of launcher settings that the scheduler writes to no file."""


@dataclass(frozen=True)
class _Leaf:
    """Unresolved value with its path, and the key name that tells if the value is a secret.

    For an item of a list or a part of a secret, this is the key of the whole list or secret.
    """

    path: str
    name: str
    parent: DictConfig | ListConfig
    key: Any
    raw: Any

    @property
    def variables(self) -> list[str]:
        """Environment variables that the value refers to."""
        return _ANY_VARIABLE.findall(self.raw) if isinstance(self.raw, str) else []

    @property
    def is_reference(self) -> bool:
        """True if the value refers to another setting and not to an environment variable."""
        return isinstance(self.raw, str) and "${" in self.raw and not self.variables

    @property
    def is_harmless(self) -> bool:
        """True if the text contains no secret, apart from references to variables or to another setting."""
        if self.is_reference:  # the setting that it refers to is checked by itself
            return recorded(str(self.value())) not in (str(self.value()), MASK)
        rest = VARIABLE.sub(MASK, str(self.raw))
        plain = _USER_FROM_VARIABLES.sub("", rest)
        return bool(self.variables) and "${" not in rest and masked_text(plain) == plain

    def value(self) -> Any:
        """Return the resolved value; None if it cannot be resolved, which `missing_values` reports."""
        try:
            return self.parent[self.key] if isinstance(self.raw, str) and "${" in self.raw else self.raw
        except OmegaConfBaseException:
            return None


def check_secrets(composed: DictConfig) -> Iterator[Violation]:
    """Yield an error for each secret in plain text in a configuration, and remember secrets from the environment.

    A setting is a secret by its key, by its format, or by the name of the variable that it refers to.
    """
    groups = [*(key for key in composed if key != "hydra"), "hydra"]
    leaves = [leaf for group in groups for leaf in _leaves_of(composed, group)]
    has_direct_secret = False
    for leaf in leaves:
        if _is_direct_secret(leaf):
            has_direct_secret = True
            yield from _check(leaf)
    # A reference to another setting may lead to a secret. Resolving all references costs more than everything above.
    for leaf in leaves if has_direct_secret else ():
        if leaf.is_reference and _is_secret(leaf):
            yield from _check(leaf)


def has_secret(composed: DictConfig, group: str) -> bool:
    """Return whether a group of a configuration, or `hydra`, has a secret.

    References to other settings are not followed, so a configuration has secrets only if one of its groups has one.
    """
    return any(map(_is_direct_secret, _leaves_of(composed, group)))


def _leaves_of(composed: DictConfig, group: Any) -> Iterator[_Leaf]:
    """Yield the unresolved values of a group, or of the settings of `hydra` that users set."""
    if group != "hydra":
        yield from _leaves(composed, group, str(group), str(group))
        return
    for key in _HYDRA_GROUPS if "hydra" in composed else ():
        for leaf in _leaves(composed.hydra, key, f"hydra.{key}", key):
            if leaf.path != "hydra.job.override_dirname":  # repeats the overrides
                yield leaf


def _is_direct_secret(leaf: _Leaf) -> bool:
    """Return whether a value is a secret; a reference to another setting is one only if its own key names a secret."""
    return (not leaf.is_reference or is_secret(leaf.name, "x")) and _is_secret(leaf)


def _check(leaf: _Leaf) -> Iterator[Violation]:
    """Yield an error if files would contain the secret; otherwise remember the variables that the secret comes from."""
    value = str(leaf.value())
    if not leaf.is_harmless:
        remember(value)
        yield Violation(leaf.path, _remedy(leaf.path))
    elif leaf.path.startswith("hydra.launcher.") and not leaf.path.startswith(_PRIVATE):
        inherited = "is a secret, which the batch script would store; leave it out, since jobs inherit this environment"
        yield Violation(leaf.path, _remedy(leaf.path) if leaf.path.startswith(_MANIFEST) else inherited)
    elif leaf.variables:
        remember(value, leaf.raw)
        for variable in filter(_names_secret, leaf.variables):
            remember(os.environ.get(variable, ""), f"${{oc.env:{variable}}}")


def check_overrides(overrides: Iterable[str]) -> Iterator[Violation]:
    """Yield an error for each plain-text secret in the overrides of a command, and redact it in all later output."""
    for override in overrides:
        key, sign, value = override.partition("=")
        name = key.lstrip("+~").rpartition(".")[2].partition("@")[0]
        unquoted = value.strip("'\"")
        parts = _SEPARATORS.split(unquoted)
        if all(_is_name_of_secret(key.lstrip("+"), part) for part in parts if part):
            continue
        if sign and not VARIABLE.search(value) and (is_secret(name, unquoted) or masked_text(unquoted) != unquoted):
            for part in {unquoted, *(part.strip(" '\"[]") for part in unquoted.split(","))}:
                if is_secret(name, unquoted):
                    remember(part)
            yield Violation(key.lstrip("+~"), _remedy(key.lstrip("+~")))


def _is_secret(leaf: _Leaf) -> bool:
    value = leaf.value()
    if value in (None, "") or not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return False
    text = str(value)
    if _is_name_of_secret(leaf.path, text):
        return False
    return is_secret(leaf.name, value) or masked_text(text) != text or any(map(_names_secret, leaf.variables))


def _is_name_of_secret(path: str, value: str) -> bool:
    """Return whether the setting at a path is the name of a secret that a cluster stores, not the secret itself."""
    return (
        path.startswith(_NAMES_OF_SECRETS)
        and _NAME_OF_SECRET.fullmatch(value) is not None
        and masked_text(value) == value
    )


def _names_secret(variable: str) -> bool:
    """Return True if the name of an environment variable indicates a secret."""
    return is_secret(variable, "x") or variable.upper().endswith(("KEY", "PASS", "PAT", "AUTH"))


def _remedy(path: str) -> str:
    if path == "tracking.uri":
        return (
            "contains a user, password or token; leave it out and set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN or, for a database, MLFLOW_TRACKING_URI in the environment"
        )
    if path == "checkpoint.mirror":
        return (
            "contains a user, password or token; leave it out, and set the credentials of the store in the environment"
        )
    if path.startswith(_MANIFEST):
        name = path.removeprefix(_MANIFEST)
        remedy = f"store it in a Secret of the cluster, and set hydra.launcher.secrets to {{{name}: SECRET/KEY}}"
        return f"is a secret, which the manifest would contain; {remedy}"
    example = f"{path}='${{oc.env:NAME}}'"
    return f"is a secret, which the run directory would store; put it into an environment variable and write {example}"


def _leaves(parent: DictConfig | ListConfig, key: Any, path: str, name: str) -> Iterator[_Leaf]:
    """Yield the values at and below a key with their key names; parts of lists and secrets have the whole's name."""
    node: Any = parent._get_child(key)
    if isinstance(node, (DictConfig, ListConfig)) and not (
        node._is_none() or node._is_missing() or node._is_interpolation()
    ):
        content: Any = node._content
        keeps_name = isinstance(node, ListConfig) or is_secret(name, "x")
        for child in range(len(content)) if isinstance(node, ListConfig) else list(content):
            yield from _leaves(node, child, f"{path}.{child!s}", name if keeps_name else str(child))
    elif node is None or not node._is_missing():
        yield _Leaf(path, name, parent, key, None if node is None else node._value())
