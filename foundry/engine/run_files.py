"""What a run directory holds from the start, besides what Hydra writes there."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foundry.config.record.frozen import save_config
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation
from foundry.data.corpora.tokenizer import tokenizer_file
from foundry.data.splits import DataSplits
from foundry.run_dir.files import (
    UnsafeFileError,
    in_hub_cache,
    make_folder,
    read_bytes,
    replaced_atomically,
    write_atomically,
)
from foundry.run_dir.lock import relock
from foundry.run_dir.log import move_logs
from foundry.run_dir.names import (
    CHAT_TEMPLATE,
    PLAN,
    RESULT,
    STATUS,
    STOP_TOKENS,
    TOKENIZER,
    TOKENIZER_FILES,
    TRANSFORMERS,
)


def write_run_files(config: Config, plan: dict[str, Any], data: DataSplits, run_dir: Path) -> dict[str, bytes]:
    """Write the configuration, the plan, and what is needed without the data: tokenizer, chat template, kept files.

    Returns:
        By name what transformers has besides, for `refill`.

    Raises:
        ConfigError: there is something in the place of one of these files.
    """
    try:
        _write_files(config, plan, data, run_dir)
        _keep_tokenizer_files(config.data, data, run_dir)
        return {path.name: read_bytes(path) for path in (run_dir / TRANSFORMERS).glob("*.*")}
    except UnsafeFileError as error:
        raise ConfigError(Violation("hydra.run.dir", str(error))) from None


def _write_files(config: Config, plan: dict[str, Any], data: DataSplits, run_dir: Path) -> None:
    save_config(config, run_dir)
    write_atomically(run_dir / PLAN, json.dumps(plan, indent=2) + "\n")
    write_vocabulary(data, run_dir)
    write_kept(data, run_dir)
    for name in (STATUS, RESULT):
        if (run_dir / name).is_dir():
            raise UnsafeFileError(run_dir / name, "a folder")


def write_kept(data: DataSplits, folder: Path) -> None:
    """Write the files that the data has kept in run directories, such as statistics."""
    for name, content in data.kept.items():
        write_atomically(folder / name, content.to_json())


def write_vocabulary(data: DataSplits, folder: Path) -> None:
    """Write tokenizer, stop tokens and chat template, where the data has them."""
    if data.tokenizer is not None:
        write_atomically(folder / TOKENIZER, data.tokenizer.to_str(pretty=True))
    if data.stop_ids:
        ids = {"eos_token_id": list(data.stop_ids), "bos_token_id": data.bos_id}
        write_atomically(folder / STOP_TOKENS, json.dumps(ids) + "\n")
    if data.chat_template is not None:
        write_atomically(folder / CHAT_TEMPLATE, data.chat_template)


def _keep_tokenizer_files(node: Any, data: DataSplits, run_dir: Path) -> None:
    """Keep what lies beside the tokenizer that was given, as it is: class, special tokens, padding, length."""
    given = getattr(node, "tokenizer", None)
    if data.tokenizer is None or not isinstance(given, str):
        return
    file = tokenizer_file(given)
    source = own if (own := file.parent / TRANSFORMERS).is_dir() else file.parent  # that of a run has its own source's
    if file.name != TOKENIZER or source == run_dir / TRANSFORMERS:
        return
    for name in TOKENIZER_FILES:
        try:
            content = read_bytes(in_hub_cache(source / name))
        except OSError:  # most are missing, and the run itself needs none
            continue
        _write_beside(run_dir, name, content)


def _write_beside(run_dir: Path, name: str, content: bytes) -> None:
    with replaced_atomically(make_folder(run_dir / TRANSFORMERS) / name) as file:
        file.write(content)


def write_architecture(node: Any, model: Any, run_dir: Path) -> None:
    """Of a model that was read from a folder of transformers, what it is built from, should the folder be gone."""
    if isinstance(node, HuggingFace) and node.path is not None:
        write_atomically(make_folder(run_dir / TRANSFORMERS) / "config.json", model.hf_config().to_json_string())


def refill(
    config: Config,
    plan: dict[str, Any],
    data: DataSplits,
    beside: Mapping[str, bytes],
    held: ExitStack,
    run_dir: Path,
) -> None:
    """Make a new folder the run's, whose own was lost; `beside` is what `write_run_files` gave.

    Raises:
        BlockingIOError: another process trains there.
    """
    if not relock(run_dir, held):
        raise BlockingIOError(f"another process trains in {run_dir}")
    move_logs(run_dir)
    _write_files(config, plan, data, run_dir)
    for name, content in beside.items():
        _write_beside(run_dir, name, content)
