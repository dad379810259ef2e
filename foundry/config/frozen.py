"""The configuration as it is kept: written into the run directory, hashed, and read back with its types."""

import hashlib
import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from foundry.config.root import Config, to_config
from foundry.config.secrets import check_secrets
from foundry.config.store import group_schemas, writable
from foundry.records.files import write_atomically
from foundry.records.redact import recorded

FILE_NAME = "config.yaml"


def plain(node: Any) -> Any:
    """Dataclasses, enums and containers as what YAML and JSON can say; of secrets the variables they come from."""
    if is_dataclass(node):
        return {item.name: plain(getattr(node, item.name)) for item in fields(node)}
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(value) for value in node]
    if isinstance(node, str):
        return recorded(node)
    return node.name if isinstance(node, Enum) else node


def hash_config(config: Config) -> str:
    """SHA-256 of the configuration, in hexadecimal, without what is computed from the number of ranks."""
    content = plain(config)
    del content["hparams"]["accum_freq"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def save_config(config: Config, run_dir: Path) -> Path:
    """Write the resolved configuration to the run directory and return the file."""
    path = run_dir / FILE_NAME
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    return path


def read_recorded(run_dir: Path) -> dict[str, Any] | None:
    """The configuration in a run directory as plain containers, from which nothing is built; None if there is none."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(run_dir / FILE_NAME), resolve=False)
    except (OSError, YAMLError, OmegaConfBaseException):
        return None
    return {str(key): value for key, value in saved.items()} if isinstance(saved, dict) else None


def load_config(run_dir: Path) -> Config:
    """Read a run's configuration back as it was.

    Raises:
        FileNotFoundError: `run_dir` holds no run.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} is not a run directory: it has no {FILE_NAME}")
    saved = OmegaConf.load(path)
    assert isinstance(saved, DictConfig)
    typed = OmegaConf.create({item.name: _typed(item.name, saved[item.name]) for item in fields(Config)})
    list(check_secrets(typed))  # takes note of them; what an older version recorded is read all the same
    return to_config(typed)


def _typed(group: str, node: Any) -> Any:
    """The node with the schema that wrote it: the one with the same fields and the same part."""
    for schema in group_schemas(group).values():
        names = [item.name for item in fields(schema)]
        default = {item.name: item.default for item in fields(schema)}
        same_part = all(node.get(key) == plain(default[key]) for key in ("_target_", "strategy") if key in default)
        if list(node) == names and same_part:
            return OmegaConf.merge(writable(schema), node)
    return node
