"""Restoring a run on one process: its configuration, data and model."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra.errors import HydraException
from torch import nn

from foundry.checkpoint.folder import CheckpointError, problems
from foundry.checkpoint.tensors import load_weights, require_shapes
from foundry.config.build import build, field_of
from foundry.config.record.frozen import load_config
from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.config.setting import check_fields
from foundry.core.errors import ConfigError, Violation, as_text, format_reason
from foundry.core.foreign import ForeignData
from foundry.core.tasks import run_files
from foundry.data.corpora.tokenizer import count_ids, find_end_token, parse_tokenizer
from foundry.data.splits import DataSplits, RunFile
from foundry.engine.initial_model import find_base, read_base
from foundry.models.initialisation import InitialModel, allocate
from foundry.models.lora import add_adapters
from foundry.parallel.device import choose_device
from foundry.parallel.process_group import World
from foundry.parts.model import add_log_probs, draw_weights, resolve_init_from, unfilled
from foundry.parts.objective import with_defaults
from foundry.planning.fake import build_fake
from foundry.run_dir.checkpoints import find
from foundry.run_dir.files import read_text
from foundry.run_dir.names import CHAT_TEMPLATE, CONFIG, PLAN, STOP_TOKENS, TOKENIZER, TRANSFORMERS
from foundry.run_dir.strict_json import read_object

_BUILT = ("model", "peft", "data", "objective", "simulator")
"""Config groups that are built when a run is opened; no code of the other groups runs."""

_MOST_LOOKS = 20
"""Maximum number of retries if retention deletes checkpoints while they are read."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class RestoredRun:
    """A trained model and its origin.

    Attributes:
        config: configuration of the run.
        model: model in eval mode, on `device`.
        data: data of the run; without samples if the run directory has a tokenizer or files of the data.
        checkpoint: folder of the checkpoint.
        device: device of the model.
        base_path: path of the adapters' base; None without adapters or if the base is not stored in a file.
    """

    config: Config
    model: nn.Module
    data: DataSplits
    checkpoint: Path
    device: torch.device
    base_path: Path | None = None


def restore(
    run_dir: str | Path,
    which: str,
    *,
    ema: bool,
    trust: bool = False,
    dtype: torch.dtype | None = None,
    device: DeviceKind = DeviceKind.auto,
) -> RestoredRun:
    """Load a checkpoint of a run, written by any number of ranks, after verifying every byte.

    Args:
        run_dir: run directory, possibly from an untrusted source.
        which: "last", "best", or a step number.
        ema: load the averaged weights if the run kept them.
        trust: also build custom parts, which runs their code.
        dtype: dtype of the floating-point weights; None keeps the dtype of training.
        device: kind of the device to compute on, independent of the device used in training.

    Raises:
        ConfigError: the run, checkpoint or device does not exist, the checkpoint is damaged, or the run is not trusted.
    """
    run_dir, torch_device = Path(run_dir), choose_device(device)
    return retry_if_replaced(
        run_dir, which, lambda: _restore(run_dir, which, ema=ema, trust=trust, dtype=dtype, device=torch_device)
    )


def retry_if_replaced(run_dir: Path, which: str, read: Callable[[], Result]) -> Result:
    """Read a checkpoint, and retry with its replacement if a running training deletes it meanwhile.

    Args:
        run_dir: run directory.
        which: "last", "best", or a step number.
        read: finds and reads the checkpoint; called again after a ConfigError or OSError if the checkpoint is gone and
            `which` now selects another.
    """
    for _ in range(_MOST_LOOKS):
        checkpoint = _identity(run_dir, which)
        try:
            return read()
        except (ConfigError, OSError):
            if (checkpoint is not None and checkpoint.is_dir()) or _identity(run_dir, which) == checkpoint:
                raise
    return read()


def _identity(run_dir: Path, which: str) -> Path | None:
    """Return the folder of the checkpoint that `which` selects now; None if it does not exist."""
    try:
        return find(run_dir, which)
    except OSError:
        return None


def _restore(
    run_dir: Path, which: str, *, ema: bool, trust: bool, dtype: torch.dtype | None, device: torch.device
) -> RestoredRun:
    config, folder, data = _open(run_dir, which, trust=trust)
    is_adapted = isinstance(config.peft, LoRA)
    model = _build_adapted(config, run_dir, folder, trust=trust) if is_adapted else _build(config, run_dir, trust=trust)
    model = model.to(dtype=dtype)
    try:
        require_shapes(folder, model, trained_only=is_adapted)  # config.yaml may ask for more memory than available
        allocate(model.parameters(), device)
        model = model.to(device)
        load_weights(folder, model, ema=ema, trained_only=is_adapted)
    except CheckpointError as error:
        raise ConfigError(Violation("which", str(error))) from error
    base_path = find_base(folder) if is_adapted else None
    return RestoredRun(config, model.eval(), data, folder, device, base_path)


def open_without_weights(run_dir: Path, which: str, *, trust: bool = False) -> RestoredRun:
    """Open a checkpoint of a run without adapters, with a model on fake tensors: shapes and dtypes without storage.

    The run may delete the checkpoint before its weights are read; see `retry_if_replaced`.

    Raises:
        ConfigError: as `restore`.
    """
    config, folder, data = _open(run_dir, which, trust=trust)
    model = build_fake(partial(_build, config, run_dir, trust=trust)).model
    return RestoredRun(config, model.eval(), data, folder, torch.device("cpu"))


def build_unfilled(run_dir: Path, *, trust: bool = False) -> nn.Module:
    """Build the model of a run on fake tensors, without adapters, checkpoint or data.

    Args:
        run_dir: run directory, possibly from an untrusted source.
        trust: also build custom parts, which runs their code.

    Raises:
        ConfigError: the directory is no run, is not trusted, or its model cannot be built.
    """
    config = load_config(run_dir, trust=trust)
    _check_bounds(run_dir, config)
    return build_fake(partial(_build, config, run_dir, trust=trust)).model


def _open(run_dir: Path, which: str, *, trust: bool) -> tuple[Config, Path, DataSplits]:
    config = load_config(run_dir, trust=trust)
    folder = _find_checkpoint(run_dir, which)
    _check_bounds(run_dir, config)
    return config, folder, _data(config, run_dir)


def build_part(config: Config, group: str, *, optional: Mapping[str, Any] | None = None, **runtime: Any) -> Any:
    """Build a part of a recorded and trusted configuration; see `build` for the arguments.

    Raises:
        ConfigError: the part cannot be imported, or a built-in part cannot be built from these settings.
    """
    try:
        with explained(f"the {group} of {CONFIG} cannot be built", config, group):
            part = build(getattr(config, group), optional=optional, **runtime)
            return with_defaults(part) if group == "objective" else part
    except HydraException as error:
        message = f"the {group} of {CONFIG} cannot be built here: {' '.join(str(error).split())}"
        raise ConfigError(Violation("run", message)) from error


@contextmanager
def explained(problem: str, config: Config, *groups: str) -> Iterator[None]:
    """Context manager that turns errors of built-in parts into a one-line message, since a run's files may be invalid.

    Raises:
        ConfigError: replaces other errors of the body; errors of custom parts pass unchanged.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not all(is_dataclass(getattr(config, group)) for group in groups):
            raise
        raise ConfigError(Violation("run", f"{problem}: {format_reason(error)}")) from error


def _build(config: Config, run_dir: Path, *, trust: bool) -> nn.Module:
    """Build the model without its weights; see `unfilled`."""
    with unfilled(config.model):
        return _build_model(config, **_own_architecture(config, run_dir, trust=trust))


def _build_model(config: Config, **runtime: Any) -> nn.Module:
    """Build the model with its constructor, and add log-probabilities if the objective reads them."""
    model: nn.Module = build_part(config, "model", **runtime)
    add_log_probs(model, config.objective, field_of(config.data, "vocab_size"))
    return model


def _build_adapted(config: Config, run_dir: Path, checkpoint: Path, *, trust: bool) -> nn.Module:
    """Build the model with the weights of its base, and with adapters that have no weights yet.

    Raises:
        ConfigError: the base is missing, or its weights have changed.
    """
    assert isinstance(config.peft, LoRA)

    def start(node: Any) -> InitialModel:
        whole_config = replace(config, model=node)
        if resolve_init_from(node) is not None:
            return InitialModel(_build(whole_config, run_dir, trust=trust))
        if isinstance(node, HuggingFace) and node.path is not None:
            return InitialModel(_build_model(whole_config))
        torch.manual_seed(config.hparams.seed)  # the run's seed, which gives the base the same random weights again
        return draw_weights(_build_model(whole_config), config.hparams.seed)

    world = World.single(torch.device("cpu"))
    model = read_base(config.model, checkpoint, start, world, "run")
    add_adapters(model, config.peft, config.hparams.seed)
    return model


def _own_architecture(config: Config, run_dir: Path, *, trust: bool) -> dict[str, Any]:
    """Return arguments that build a transformers model without weights, from the architecture in the run directory.

    With `trust`, a run directory without the architecture is allowed: the original folder is read.

    Raises:
        ConfigError: the run directory has no architecture, and the run is not trusted.
    """
    if not isinstance(config.model, HuggingFace) or config.model.path is None:
        return {}
    folder = run_dir / TRANSFORMERS
    if os.path.lexists(folder):
        return {"path": str(folder), "read_weights": False}
    if trust:
        return {"read_weights": False}
    message = f"has no {TRANSFORMERS}/, and its model.path={as_text(config.model.path)} is outside of it"
    raise ConfigError(Violation("run", f"{run_dir} {message}; add trust=true to read that folder"))


def _find_checkpoint(run_dir: Path, which: str) -> Path:
    if any((run_dir / name).is_file() for name in ("config.json", "adapter_config.json")):
        message = f"is {run_dir}, which is an export and has no checkpoints; give the run that was exported"
        raise ConfigError(Violation("run", message))
    try:
        folder = find(run_dir, which)
    except FileNotFoundError as error:
        raise ConfigError(Violation("which", str(error))) from None
    if damage := problems(folder):
        message = f"is {which}, but {folder} is damaged: {'; '.join(damage)}; choose another step"
        raise ConfigError(Violation("which", message))
    return folder


def _check_bounds(run_dir: Path, config: Config) -> None:
    """Refuse invalid settings of the groups in `_BUILT`, as composing does for new runs."""
    violations = list[Violation]()
    for group in _BUILT:
        node = getattr(config, group)
        out_of_bounds = list(check_fields(node, group))
        violations += out_of_bounds if out_of_bounds or not hasattr(node, "check") else node.check()
    if violations:
        raise ConfigError(Violation("run", f"{run_dir / CONFIG}: {violation}") for violation in violations)


def _data(config: Config, run_dir: Path) -> DataSplits:
    """Return the run's tokenizer and data files, without samples; a run without these files gets its data built again.

    If the files exist, no samples are read: the configuration names their path, which may be somebody else's.

    Raises:
        ConfigError: a file that the data wrote is missing or invalid.
    """
    file = run_dir / TOKENIZER
    kept_files = _read_run_files(run_dir)
    for name, kind in getattr(config.data, "run_files", {}).items():
        if not os.path.lexists(run_dir / name):
            raise ConfigError(Violation("run", f"{run_dir} has no {name}, which {kind} writes"))
    if not os.path.lexists(file):
        if kept_files:
            return DataSplits(train=[], validation=[], fingerprint="", kept=kept_files)
        data: DataSplits = build_part(config, "data", seed=config.hparams.seed)
        return data
    tokens = None if kept_files else _tokens_per_sample(run_dir / PLAN)
    with ForeignData(lambda reason: ConfigError(Violation("run", f"{file} is not a valid tokenizer: {reason}"))):
        tokenizer = parse_tokenizer(read_text(file))
    return DataSplits(
        train=[],
        validation=[],
        fingerprint="",
        tokens_per_sample=tokens,
        max_tokens=field_of(config.data, "seq_len"),
        tokenizer=tokenizer,
        **_special_tokens(run_dir / STOP_TOKENS, tokenizer),
        chat_template=_chat_template(run_dir / CHAT_TEMPLATE),
        kept=kept_files,
    )


@contextmanager
def _file_explained(file: Path) -> Iterator[None]:
    """Context manager that turns errors of reading a file of the run into a one-line message.

    Raises:
        ConfigError: replaces an OSError or ValueError of the body.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(Violation("run", f"{file} {reason}")) from None


def _read_run_files(run_dir: Path) -> dict[str, RunFile]:
    """Read the files that the run keeps of its data, by name, for all registered tasks.

    Raises:
        ConfigError: a file is not in foundry's format.
    """
    files = dict[str, RunFile]()
    for name, kind in run_files().items():
        if os.path.lexists(run_dir / name):
            with _file_explained(run_dir / name):
                files[name] = kind.from_json(read_text(run_dir / name))
    return files


def _special_tokens(file: Path, tokenizer: Any) -> dict[str, Any]:
    """Read the stop tokens and the first token of chats; without the file, as in old runs, use the end token only.

    Raises:
        ConfigError: the file is not in foundry's format.
    """
    if not os.path.lexists(file):
        end = find_end_token(tokenizer)
        return {"stop_ids": () if end is None else (end,)}
    with _file_explained(file):
        content = read_object(file, required={"eos_token_id": list})
    stop, first = content["eos_token_id"], content.get("bos_token_id")
    vocab_size = count_ids(tokenizer)
    for item in stop if first is None else [*stop, first]:
        if type(item) is not int or not 0 <= item < vocab_size:
            raise ConfigError(Violation("run", f"{file} has {as_text(item)}, which is not a token of {TOKENIZER}"))
    return {"stop_ids": tuple(stop), "bos_id": first}


def _chat_template(file: Path) -> str | None:
    if not os.path.lexists(file):
        return None
    with _file_explained(file):
        return read_text(file)


def _tokens_per_sample(plan: Path) -> int:
    """Read `tokens_per_sample` from plan.json.

    Raises:
        ConfigError: the file or its value is invalid.
    """
    with _file_explained(plan):
        tokens: int = read_object(plan, required={"tokens_per_sample": int})["tokens_per_sample"]
    if not 1 <= tokens < 2**63:
        raise ConfigError(
            Violation("run", f"{plan} has tokens_per_sample={as_text(tokens)}, not a whole number above 0")
        )
    return tokens
