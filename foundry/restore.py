"""Opening a run again: its configuration, data and model, on one process."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from foundry.checkpoint.folder import find
from foundry.checkpoint.tensors import load_weights
from foundry.config.errors import ConfigError, Violation
from foundry.config.frozen import load_config
from foundry.config.root import Config
from foundry.data.splits import DataSplits
from foundry.parts import build_data, build_model
from foundry.planning.derive import PLAN
from foundry.run import TOKENIZER


@dataclass(frozen=True)
class Restored:
    """A trained model and where it came from.

    Attributes:
        config: the run's configuration.
        model: in evaluation mode, on `device`.
        data: the run's; of text only the tokenizer, without samples.
        checkpoint: the folder that was read.
    """

    config: Config
    model: nn.Module
    data: DataSplits
    checkpoint: Path
    device: torch.device


def restore(run_dir: str, which: str, *, ema: bool) -> Restored:
    """Read a checkpoint of a run, whatever number of ranks wrote it.

    Args:
        run_dir: the run directory.
        which: "last", "best", or the number of a step.
        ema: take the averaged weights, where the run kept them.

    Raises:
        ConfigError: there is no such run or checkpoint.
    """
    try:
        config = load_config(Path(run_dir))
    except FileNotFoundError as error:
        raise ConfigError(Violation("run", str(error))) from None
    try:
        folder = find(Path(run_dir), which)
    except FileNotFoundError as error:
        raise ConfigError(Violation("which", str(error))) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config)
    load_weights(folder, model, ema=ema)
    return Restored(config, model.to(device).eval(), _data(config, Path(run_dir)), folder, device)


def _data(config: Config, run_dir: Path) -> DataSplits:
    """The run's tokenizer without its text; for other data, the data."""
    if not (run_dir / TOKENIZER).is_file():
        return build_data(config)
    from tokenizers import Tokenizer

    tokens = json.loads((run_dir / PLAN).read_text())["tokens_per_sample"]
    tokenizer = Tokenizer.from_file(str(run_dir / TOKENIZER))
    return DataSplits(train=[], validation=[], fingerprint="", tokens_per_sample=tokens, tokenizer=tokenizer)
