"""Selection and checks of the checkpoint to resume from: the run's newest intact one, or one of another run."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from foundry.checkpoint.exchange import find_newest
from foundry.checkpoint.folder import CheckpointError, Manifest, list_put_aside, read_manifest
from foundry.checkpoint.rng import seed_rng, set_rng_state
from foundry.checkpoint.verification import find_damage_on_all_ranks, together, verify_newest
from foundry.config.record.resume_compat import REMEDY, Difference, differences
from foundry.config.schemas.checkpoint import OnChangedConfig
from foundry.config.schemas.root import Config
from foundry.config.setting import OnResume
from foundry.core.errors import ConfigError, Violation, as_text, contrast
from foundry.core.foreign import ForeignData
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import BEST, LATEST, MANIFEST, list_checkpoints, parse_step
from foundry.run_dir.files import UnsafeFileError, read_text
from foundry.run_dir.names import CHECKPOINTS

log = logging.getLogger(__name__)
_KEY = "checkpoint.resume"
_DATA_KEYS = {"content": ("path",), "tokenizer": ("tokenizer",), "samples": ()}
"""Entries of the data identity that are compared, each with the settings most likely to have changed it."""
_DIGEST_LENGTH = 12


@dataclass(frozen=True)
class ResumePoint:
    """An intact checkpoint to resume a run from.

    Attributes:
        folder: the checkpoint.
        manifest: the manifest of the checkpoint, without the entries that do not apply to this run.
    """

    folder: Path
    manifest: Manifest

    @property
    def state(self) -> dict[str, Any]:
        """State of the trainer; a read of a missing key raises `ConfigError`."""
        return _RequiredKeys({key: _require_keys(value) for key, value in self.manifest.state.items()})

    def reading(self) -> ForeignData:
        """Return a context manager for reading the state: an invalid state raises `ConfigError`."""
        return ForeignData(self._state_error)

    def _state_error(self, reason: str) -> ConfigError:
        return ConfigError(
            Violation(_KEY, f"leads to {self.folder}, whose state is invalid: {reason}; choose another checkpoint")
        )


def find_resume_point(resume: str, run_dir: Path, world: World) -> ResumePoint | None:
    """Return the checkpoint to resume from, or None to start from scratch.

    All ranks call this and get the same result.

    If the run directory has checkpoints, the run resumes from them, even if it first started from another run's
    checkpoint. Damaged checkpoints newer than the chosen one are renamed to names that end in `.corrupt`, so that they
    are ignored but not lost. If there are checkpoints but none is intact, or one cannot be read, nothing is renamed and
    the run does not start, because it would start from step 0.

    Args:
        resume: auto, never, or the path of a run directory or checkpoint.
        run_dir: directory of this run.
        world: this rank and its process group.

    Raises:
        ConfigError: if no checkpoint at the path or in the run directory is intact, if one cannot be read, or if
            `resume` is never and the run has checkpoints.
    """
    try:
        return _find_origin(resume, run_dir, world)
    except (CheckpointError, OSError) as error:
        message = (
            f"is {resume}, but a checkpoint cannot be read: {error}; correct that, or choose another hydra.run.dir"
        )
        raise ConfigError(Violation(_KEY, f"{message} (nothing was changed)")) from error


def _find_origin(resume: str, run_dir: Path, world: World) -> ResumePoint | None:
    names = together(partial(_list_checkpoints, run_dir), world)[0]
    if resume == "never":
        if names:
            raise ConfigError(Violation(_KEY, f"is never but {run_dir} has checkpoints; choose another hydra.run.dir"))
        return None
    newest = find_newest(run_dir, world)
    if newest is not None:
        together(partial(_put_aside_newer, run_dir, newest if world.leads_disk else None), world)
        return ResumePoint(newest, read_manifest(newest))
    if names:
        message = (
            f"is {resume}, but all checkpoints ({', '.join(names)}) in {run_dir / 'checkpoints'} are damaged; to "
            "start from scratch, move that folder away or choose another hydra.run.dir"
        )
        raise ConfigError(Violation(_KEY, message))
    return None if resume == "auto" else _find_elsewhere(Path(resume), world)


def _list_checkpoints(run_dir: Path) -> list[str]:
    """Return the names of all checkpoints, including the damaged ones that were renamed.

    Checkpoints are deleted in their folder, so the folder must not be a symlink, and `latest` and `best` must be
    symlinks.
    """
    if (run_dir / CHECKPOINTS).is_symlink():
        raise UnsafeFileError(run_dir / CHECKPOINTS, "a symbolic link", "a folder of the run directory")
    for path in (run_dir / CHECKPOINTS / name for name in (LATEST, BEST)):
        if os.path.lexists(path) and not path.is_symlink():
            raise UnsafeFileError(path, "a folder" if path.is_dir() else "a file", "a symbolic link to a checkpoint")
    return [folder.name for folder in (*list_checkpoints(run_dir), *list_put_aside(run_dir))]


def check_config(
    resume_point: ResumePoint, config: Config, recorded: Mapping[str, Any], on_changed: OnChangedConfig
) -> None:
    """Log the settings that differ between a resumed run and the saved one; reject changes that affect the result.

    The location of the data may differ if the checkpoint records the identity of its content, which `check_data`
    compares.

    Args:
        resume_point: the checkpoint.
        config: configuration of this run.
        recorded: configuration of this run, in the form that a manifest records.
        on_changed: raise an error, or only log a warning.

    Raises:
        ConfigError: if changed settings affect the result and `on_changed` is error; each has a line in the message.
    """
    changes: list[Difference] = []
    for difference in differences(resume_point.manifest.config, recorded, config):
        if difference.is_removed:
            message = "ignored %s=%s of the checkpoint: this version of foundry does not have the setting"
            log.warning(message, difference.key, as_text(difference.old))
        elif difference.is_allowed or (difference.locates_data and resume_point.manifest.data):
            log.info("resumed with %s", difference)
        else:
            changes.append(difference)
    if changes and on_changed is OnChangedConfig.error:
        raise ConfigError(difference.violation() for difference in changes)
    for difference in changes:
        log.warning("resumed with another %s: the result differs from that of the saved run", difference)


def check_data(
    resume_point: ResumePoint, now: Mapping[str, Any], settings: Mapping[str, Any], on_changed: OnChangedConfig
) -> str:
    """Check that the data is the data on which the checkpoint was trained; its location may differ.

    Args:
        resume_point: the checkpoint.
        now: identity of this run's data.
        settings: settings of the data, for the error message.
        on_changed: raise an error, or only log a warning.

    Returns:
        The fingerprint that determines the order of samples: the checkpoint's if it records one and the content of the
        data did not change, otherwise that of this run's data.

    Raises:
        ConfigError: if the content, the tokenizer or the number of samples differs and `on_changed` is error.
    """
    was = resume_point.manifest.data
    changed = changed_data(resume_point.manifest, now)
    differing = _differing_settings(resume_point.manifest, settings)
    violations: list[Violation] = []
    for name in changed:
        # Report the first difference only, since later ones follow from it, except for a tokenizer that the user chose.
        if name != changed[0] and (name != "tokenizer" or settings.get("tokenizer") is None):
            continue
        keys = [key for key in (*differing, *_DATA_KEYS[name]) if (key == "tokenizer") == (name == "tokenizer")]
        key = next((f"data.{key}" for key in keys if key in settings and key != "_target_"), "data")
        texts = contrast(was[name], now[name], _digest)
        violations.append(
            Violation(key, f"differs from the data that the checkpoint was trained on ({name} {' -> '.join(texts)})")
        )
    _refuse(violations, on_changed)
    return str(now["order"] if "content" in changed else was.get("order", now["order"]))


def _differing_settings(manifest: Manifest, settings: Mapping[str, Any]) -> list[str]:
    """Return the data settings whose values differ from the checkpoint's; settings that locate the data come first."""
    recorded = manifest.config.get("data")
    changes = list(differences({"data": recorded or settings}, {"data": settings}))
    changes.sort(key=lambda difference: not difference.locates_data)
    return [change.key.split(".")[1] for change in changes if change.on_resume is not OnResume.same]


def _digest(value: object) -> str:
    return str(value)[:_DIGEST_LENGTH]


def _refuse(violations: Sequence[Violation], on_changed: OnChangedConfig) -> None:
    """Raise `ConfigError` with the violations and their remedy, or only log them, depending on `on_changed`."""
    if violations and on_changed is OnChangedConfig.error:
        raise ConfigError(Violation(violation.key, f"{violation.message}; {REMEDY}") for violation in violations)
    for violation in violations:
        log.warning("resumed although %s", violation)


def check_base(resume_point: ResumePoint, now: Mapping[str, Any], on_changed: OnChangedConfig) -> None:
    """Check that adapters continue training with the base weights that they were trained with.

    Only the digest of the weights is compared; their location may differ.

    Args:
        resume_point: the checkpoint.
        now: digest and path of this run's base weights.
        on_changed: raise an error, or only log a warning.

    Raises:
        ConfigError: if the base weights differ and `on_changed` is error.
    """
    was = resume_point.manifest.base
    if was.get("digest") == now["digest"]:
        return
    message = (
        f"differs from the base that the adapters of the checkpoint were trained with, at {was.get('path')} (digest "
        f"{was.get('digest')} -> {now['digest']})"
    )
    _refuse([Violation("model.init_from", message)], on_changed)


def changed_data(manifest: Manifest, now: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries of `now`, the data identity of a run, that differ from a checkpoint's.

    An entry that the checkpoint does not record counts as equal.
    """
    return [name for name in _DATA_KEYS if manifest.data.get(name) not in (None, now[name])]


class _RequiredKeys(dict[str, Any]):
    """A dict that raises `ConfigError` for a missing key."""

    def __missing__(self, key: str) -> Any:
        message = f"leads to a checkpoint without {key} in its state; choose another checkpoint"
        raise ConfigError(Violation(_KEY, message))


def _require_keys(value: Any) -> Any:
    return (
        _RequiredKeys({key: _require_keys(item) for key, item in value.items()}) if isinstance(value, dict) else value
    )


def without_stop_reason(resume_point: ResumePoint) -> ResumePoint:
    """Return the checkpoint without its stop reason, to continue a run that a stop rule or the time limit ended."""
    return replace(
        resume_point,
        manifest=replace(resume_point.manifest, state={**resume_point.manifest.state, "stop_reason": None}),
    )


def is_longer(resume_point: ResumePoint | None, config: Mapping[str, Any]) -> bool:
    """Return whether a finished run should continue, because one of its budgets was raised or removed since."""
    if resume_point is None:
        return False
    budgets = [d for d in differences(resume_point.manifest.config, config) if d.is_budget and d.old is not None]
    return any(d.new is None or d.new > d.old for d in budgets)


def restore_rng(resume_point: ResumePoint, world: World, seed: int) -> None:
    """Restore this rank's RNG state; if the number of ranks changed or the state is missing, use a new seed."""
    file = resume_point.folder / f"rank-{world.rank:05d}.json"
    if resume_point.manifest.world_size == world.world_size and file.name in resume_point.manifest.files:
        set_rng_state(json.loads(read_text(file)), world.device)
    else:
        seed_rng(seed + 1 + world.rank + 1_000_003 * resume_point.manifest.step)


def _find_elsewhere(path: Path, world: World) -> ResumePoint:
    """Return the checkpoint at `path`, or the newest intact one in it, without its run's stop reason and best step."""
    folder: Path | None = path.expanduser().resolve()  # resolves `latest` to the checkpoint
    assert folder is not None
    if not os.path.lexists(folder / MANIFEST):
        folder = verify_newest(folder, world)
    elif damage := find_damage_on_all_ranks(folder, world):
        raise ConfigError(Violation(_KEY, f"is {path}, which is damaged: {'; '.join(damage)}"))
    if folder is None:
        raise ConfigError(Violation(_KEY, f"is {path}, which has no intact checkpoint"))
    manifest = read_manifest(folder)
    state = {**manifest.state, "stop_reason": None, "best": {"step": None, "value": None}}
    return ResumePoint(folder, replace(manifest, state=state))


def _put_aside_newer(run_dir: Path, newest: Path | None) -> None:
    """Rename all checkpoints that are newer than `newest`, the newest intact one; None renames nothing."""
    for folder in list_checkpoints(run_dir) if newest is not None else ():
        if newest is not None and parse_step(folder) > parse_step(newest):
            folder.rename(_free_path(folder.with_name(f"{folder.name}.corrupt")))


def _free_path(path: Path) -> Path:
    """Return the path, or if it exists the path with the first free number appended."""
    return next(p for p in chain([path], (path.with_name(f"{path.name}{n}") for n in count(2))) if not p.exists())
