"""`foundry sample run=DIR`: generate text or images with a checkpoint."""

import inspect
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foundry.config.command import (
    Outcome,
    check_output,
    check_writable,
    command,
    folder_option,
    print_path,
    require_out,
    run_option,
)
from foundry.config.composition.store import group_schemas
from foundry.config.schemas.device import KIND_DOC, DeviceKind
from foundry.config.schemas.precision import WeightsDtype
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.checkpoints import parse_step
from foundry.run_dir.names import PLOTS

if TYPE_CHECKING:
    from foundry.data.splits import DataSplits

_SUFFIXES = (".txt", ".png")
"""Suffixes of sample files: text and images."""


@dataclass(frozen=True, kw_only=True)
class _CommonOptions:
    """Options that do not depend on the run's objective."""

    run: str = setting("???", "run directory, or the URL of its mirror")
    which: str = setting("last", "checkpoint: last, best, or the number of a step")
    out: str | None = setting(
        None, "new output file, without suffix; null: drawn_<checkpoint> in plots/ of the run directory"
    )
    ema: bool = setting(True, "use the averaged weights, if the run has them")
    trust: bool = setting(False, "run the code of parts in config.yaml that are not part of foundry")
    dtype: WeightsDtype | None = setting(None, "dtype of the floating-point weights; null: as in training")
    device: DeviceKind = setting(DeviceKind.auto, KIND_DOC)
    seed: int = setting(0, "seed of sampling", ge=0, le=2**63 - 1)


_KINDS = (getattr(schema, "sampling", None) for schema in group_schemas("objective").values())
_SAMPLING = tuple(dict.fromkeys(kind for kind in _KINDS if is_dataclass(kind)))


@dataclass(frozen=True, kw_only=True)
class SampleOptions(*_SAMPLING, _CommonOptions):  # type: ignore[misc] # as many bases as there are objectives
    """Options of the command, with the sampling options of every objective; null leaves those to the objective."""


def sample(options: SampleOptions) -> Path:
    """Generate samples, write them and return the file; see `draw`."""
    return Path(draw(options).facts["file"])


def draw(options: SampleOptions) -> Outcome:
    """Generate, write and print samples.

    Raises:
        ConfigError: the run or checkpoint does not exist, or the run's objective does not have one of the options.
    """
    import torch

    from foundry.engine.restore import build_part, explained, restore
    from foundry.generation.text_samples import TextSamples
    from foundry.parallel.precision import fp32_arithmetic
    from foundry.parallel.process_group import World

    require_out(options.run, options.out)
    run_dir = run_option("run", options.run, options.which)
    out = _check_output_files(options, run_dir)
    dtype = None if options.dtype is None else getattr(torch, options.dtype.value)
    restored = restore(run_dir, options.which, ema=options.ema, trust=options.trust, dtype=dtype, device=options.device)
    optional = {"world": World.single(restored.device), "tokenizer": restored.data.tokenizer}
    objective = build_part(restored.config, "objective", optional=optional)
    sampling_options = _sampling_options(options, getattr(restored.model, "image_size", None))
    generate = _find_generator(objective, restored.data, options.run, sampling_options)
    if not all(bool(tensor.isfinite().all()) for tensor in restored.model.state_dict().values()):
        message = f"is {options.which}, whose weights are NaN or infinite; choose an earlier step"
        raise ConfigError(Violation("which", message))
    with (
        fp32_arithmetic(tf32=restored.config.precision.tf32),
        explained(f"{run_dir} cannot generate samples", restored.config, "model", "data", "objective"),
    ):
        samples = generate(restored.model, restored.data, restored.device, seed=options.seed, **sampling_options)
    if isinstance(samples, TextSamples):
        samples = replace(samples, step=parse_step(restored.checkpoint))
    stem = run_dir / PLOTS / f"drawn_{restored.checkpoint.name}" if out is None else out  # samples_* are from training
    stem.parent.mkdir(parents=True, exist_ok=True)
    file: Path = samples.save(stem) if out is None else _save_checked(samples, stem)
    if hasattr(samples, "text"):
        sys.stdout.write(f"{samples.text}\n")
    print_path(file)
    return Outcome({"file": str(file), "texts": list(samples.texts) if isinstance(samples, TextSamples) else None})


def _check_output_files(options: SampleOptions, run_dir: Path) -> Path | None:
    """Return the output file without its suffix; None for a file in the run directory.

    Raises:
        ConfigError: the file exists, or the run directory cannot be written.
    """
    if not options.out:
        check_writable("run", run_dir / PLOTS)
        return None
    out = folder_option("out", options.out)
    for suffix in _SUFFIXES:
        check_output("out", Path(f"{out}{suffix}"))
    return out


def _sampling_options(options: SampleOptions, image_size: int | None) -> dict[str, Any]:
    """Return the sampling options that are set; `image_size` as for `_read_image`.

    Raises:
        ConfigError: the image cannot be read, or the model takes none.
    """
    names = [item.name for schema in _SAMPLING for item in fields(schema)]
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    return values if options.image is None else values | {"image": _read_image(options.image, image_size)}


def _find_generator(objective: Any, data: "DataSplits", run: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that generates samples: that of the objective, or `continue_text` for a run on text.

    Raises:
        ConfigError: the objective generates no samples, or does not have one of the options.
    """
    from foundry.generation.text_samples import continue_text

    kind, generate = type(objective).__name__, objective.generate
    if generate is None and data.tokenizer is not None and not data.kept:
        generate = continue_text
    if generate is None:
        raise ConfigError(Violation("run", f"is {run}, whose objective {kind} generates no samples"))
    parameters = inspect.signature(generate).parameters.values()
    accepted = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):  # passed on to continue_text
        accepted |= set(inspect.signature(continue_text).parameters)
    if unknown := [name for name in options if name not in accepted]:
        raise ConfigError([Violation(name, f"is not an option of objective {kind}") for name in unknown])
    return cast(Callable[..., Any], generate)


def _save_checked(samples: Any, stem: Path) -> Path:
    """Write samples to a temporary folder and move them from there, since a custom objective may use any suffix.

    Raises:
        ConfigError: a file of this name and suffix exists.
    """
    with tempfile.TemporaryDirectory(prefix=".samples-", dir=stem.parent) as folder:
        file: Path = samples.save(Path(folder) / stem.name)
        paths = list(Path(folder).iterdir())
        for path in paths:
            check_output("out", stem.parent / path.name)
        for path in paths:
            path.rename(stem.parent / path.name)
    return stem.parent / file.name


def _read_image(file: str, size: int | None) -> Any:
    """Read an image as (3, size, size) uint8; `size` is the height and width of the model's input, None without images.

    Raises:
        ConfigError: the model does not accept images, or the file is not an image.
    """
    import torch

    from foundry.config.schemas.data import PictureFit
    from foundry.data.images.pictures import read_picture

    if size is None:
        raise ConfigError(Violation("image", f"is {file} but the model takes no images; leave it out"))
    path = folder_option("image", file)
    try:
        return torch.from_numpy(read_picture(path, size=size, channels=3, fit=PictureFit.stretch).copy())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(Violation("image", f"is {file}, which cannot be read as an image: {reason}")) from None


def main() -> None:
    """Entry point of the command."""
    command(SampleOptions, draw, name="foundry.sample", doc=__doc__.split(": ", 1)[1])
