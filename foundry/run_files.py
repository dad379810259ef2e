"""What a run directory holds from the start, besides what Hydra writes there."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foundry.config.errors import ConfigError, Violation
from foundry.config.frozen import save_config
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.root import Config
from foundry.data.splits import DataSplits
from foundry.run_dir.files import UnsafeFileError, make_folder, write_atomically
from foundry.run_dir.lock import relock
from foundry.run_dir.log import move_logs
from foundry.run_dir.names import CHAT_TEMPLATE, PLAN, RESULT, STATISTICS, STATUS, STOP_TOKENS, TOKENIZER, TRANSFORMERS


def write_run_files(config: Config, plan: dict[str, Any], data: DataSplits, run_dir: Path) -> None:
    """Write the configuration, the plan, and what is needed without the data: tokenizer, chat template, statistics.

    Raises:
        ConfigError: there is something in the place of one of these files.
    """
    try:
        save_config(config, run_dir)
        write_atomically(run_dir / PLAN, json.dumps(plan, indent=2) + "\n")
        write_vocabulary(data, run_dir)
        if data.statistics is not None:
            write_atomically(run_dir / STATISTICS, data.statistics.to_json())
        for name in (STATUS, RESULT):
            if (run_dir / name).is_dir():
                raise UnsafeFileError(run_dir / name, "a folder")
    except UnsafeFileError as error:
        raise ConfigError(Violation("hydra.run.dir", str(error))) from None


def write_vocabulary(data: DataSplits, folder: Path) -> None:
    """Write tokenizer, stop tokens and chat template, where the data has them."""
    if data.tokenizer is not None:
        write_atomically(folder / TOKENIZER, data.tokenizer.to_str(pretty=True))
    if data.stop_ids:
        ids = {"eos_token_id": list(data.stop_ids), "bos_token_id": data.bos_id}
        write_atomically(folder / STOP_TOKENS, json.dumps(ids) + "\n")
    if data.chat_template is not None:
        write_atomically(folder / CHAT_TEMPLATE, data.chat_template)


def write_architecture(config: Config, model: Any, run_dir: Path) -> None:
    """Of a model that was read from a folder of transformers, what it is built from, should the folder be gone."""
    if isinstance(config.model, HuggingFace) and config.model.path is not None:
        write_atomically(make_folder(run_dir / TRANSFORMERS) / "config.json", model.hf_config().to_json_string())


def refill(config: Config, plan: dict[str, Any], data: DataSplits, held: ExitStack, run_dir: Path) -> None:
    """Make a new folder the run's, whose own was lost.

    Raises:
        BlockingIOError: another process trains there.
    """
    if not relock(run_dir, held):
        raise BlockingIOError(f"another process trains in {run_dir}")
    move_logs(run_dir)
    write_run_files(config, plan, data, run_dir)
