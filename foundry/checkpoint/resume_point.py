"""Where a run resumes from: its own newest whole checkpoint, or another run's."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from foundry.checkpoint.folder import CheckpointError, Manifest, list_put_aside, read_manifest
from foundry.checkpoint.rng import seed_rng, set_rng_state
from foundry.checkpoint.verification import damage_together, together, verify_newest
from foundry.config.record.resume_compat import REMEDY, Difference, differences
from foundry.config.schemas.checkpoint import OnChangedConfig
from foundry.config.schemas.root import Config
from foundry.config.setting import OnResume
from foundry.core.errors import ConfigError, Violation, contrast
from foundry.core.foreign import ForeignData
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import BEST, LATEST, MANIFEST, list_checkpoints, parse_step
from foundry.run_dir.files import UnsafeFileError, read_text
from foundry.run_dir.names import CHECKPOINTS

log = logging.getLogger(__name__)
_KEY = "checkpoint.resume"
_DATA_KEYS = {"content": ("path",), "tokenizer": ("tokenizer",), "samples": ()}
"""What the identity of data is compared by, and the settings it depends on first."""
_DIGEST_SHOWN = 12


@dataclass(frozen=True)
class ResumePoint:
    """A whole checkpoint that a run resumes from.

    Attributes:
        folder: the checkpoint.
        manifest: what it says of itself, or what of that holds for this run.
    """

    folder: Path
    manifest: Manifest

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's state; what it lacks is a ConfigError when it is asked for."""
        return _Told({key: _told(value) for key, value in self.manifest.state.items()})

    def reading(self) -> ForeignData:
        """Return the context in which the state is read: what does not fit a run is a ConfigError."""
        return ForeignData(self._state_error)

    def _state_error(self, reason: str) -> ConfigError:
        return ConfigError(
            Violation(
                _KEY, f"leads to {self.folder}, which holds no state of a run: {reason}; choose another checkpoint"
            )
        )


def find_resume_point(resume: str, run_dir: Path, world: World) -> ResumePoint | None:
    """The checkpoint to resume from; all ranks together, and with the same answer.

    A run directory that has checkpoints of its own resumes from them, wherever it once started. Those that are damaged
    and newer are put aside under a name that ends in `.corrupt`, so that they neither count nor are lost. Where none is
    whole, or one cannot be read, nothing is renamed and the run does not start: it would start from step 0.

    Args:
        resume: auto, never, or a run directory or checkpoint.
        run_dir: of this run.
        world: this rank and the others.

    Raises:
        ConfigError: there is no whole checkpoint at the path or among the run's own, one cannot be read, or `never`
            meets a run that has some.
    """
    try:
        return _find_origin(resume, run_dir, world)
    except (CheckpointError, OSError) as error:
        message = f"is {resume}, but a checkpoint cannot be used: {error}; mend that, or choose another hydra.run.dir"
        raise ConfigError(Violation(_KEY, f"{message} (nothing was changed)")) from error


def _find_origin(resume: str, run_dir: Path, world: World) -> ResumePoint | None:
    were_there = together(partial(_list_checkpoints, run_dir), world)[0]
    if resume == "never":
        if were_there:
            raise ConfigError(Violation(_KEY, f"is never but {run_dir} has checkpoints; choose another hydra.run.dir"))
        return None
    own = verify_newest(run_dir, world)
    if own is not None:
        together(partial(_put_aside_newer, run_dir, own if world.is_main else None), world)
        return ResumePoint(own, read_manifest(own))
    if were_there:
        message = (
            f"is {resume}, but of {', '.join(were_there)} in {run_dir / 'checkpoints'} none is whole; to start from "
            "scratch, move that folder away or choose another hydra.run.dir"
        )
        raise ConfigError(Violation(_KEY, message))
    return None if resume == "auto" else _elsewhere(Path(resume), world)


def _list_checkpoints(run_dir: Path) -> list[str]:
    """The names of those there are, or were; the folder must be the run's own, since checkpoints are deleted in it."""
    if (run_dir / CHECKPOINTS).is_symlink():
        raise UnsafeFileError(run_dir / CHECKPOINTS, "a symbolic link", "a folder of the run directory")
    for path in (run_dir / CHECKPOINTS / name for name in (LATEST, BEST)):
        if os.path.lexists(path) and not path.is_symlink():
            raise UnsafeFileError(path, "a folder" if path.is_dir() else "a file", "a symbolic link to a checkpoint")
    return [folder.name for folder in (*list_checkpoints(run_dir), *list_put_aside(run_dir))]


def check_config(
    resume_point: ResumePoint, config: Config, recorded: Mapping[str, Any], on_changed: OnChangedConfig
) -> None:
    """Say in which settings a resumed run differs from the one that was saved, and refuse what makes it another.

    Args:
        resume_point: the checkpoint.
        config: of this run.
        recorded: the same as a manifest holds it.
        on_changed: whether to refuse, or only to warn.

    Where data lies may differ if the checkpoint knows its content, which `check_data` compares.

    Raises:
        ConfigError: with a line for every setting that changes what the run computes.
    """
    refused: list[Difference] = []
    for difference in differences(resume_point.manifest.config, recorded, config):
        if difference.is_gone:
            log.warning("the checkpoint was trained with another version of foundry: %s", difference)
        elif difference.is_allowed or (difference.locates_data and resume_point.manifest.data):
            log.info("resumed with %s", difference)
        else:
            refused.append(difference)
    if refused and on_changed is OnChangedConfig.error:
        raise ConfigError(difference.violation() for difference in refused)
    for difference in refused:
        log.warning("resumed with another %s: the run is no longer the one that was saved", difference)


def check_data(
    resume_point: ResumePoint, now: Mapping[str, Any], settings: Mapping[str, Any], on_changed: OnChangedConfig
) -> str:
    """Refuse other data than the checkpoint was trained on, wherever either lies.

    Args:
        resume_point: the checkpoint.
        now: the identity of this run's data.
        settings: of the data, to be named.
        on_changed: whether to refuse, or only to warn.

    Returns:
        The fingerprint from which the order of samples is drawn: the checkpoint's, as far as its data is this data.

    Raises:
        ConfigError: the content, the tokenizer or the number of samples is another.
    """
    was = resume_point.manifest.data
    changed = changed_data(resume_point.manifest, now)
    differing = _differing_settings(resume_point.manifest, settings)
    wrong: list[Violation] = []
    for name in changed:
        # The rest follows from what comes first, but for a tokenizer that was chosen.
        if name != changed[0] and (name != "tokenizer" or settings.get("tokenizer") is None):
            continue
        keys = [key for key in (*differing, *_DATA_KEYS[name]) if (key == "tokenizer") == (name == "tokenizer")]
        key = next((f"data.{key}" for key in keys if key in settings and key != "_target_"), "data")
        texts = contrast(was[name], now[name], _digest)
        wrong.append(
            Violation(key, f"gives other data than the checkpoint was trained on ({name} {' -> '.join(texts)})")
        )
    _refuse(wrong, on_changed)
    return str(now["order"] if "content" in changed else was.get("order", now["order"]))


def _differing_settings(manifest: Manifest, settings: Mapping[str, Any]) -> list[str]:
    """Settings of the data whose values differ from the checkpoint's, first those that say where it lies."""
    recorded = manifest.config.get("data")
    found = list(differences({"data": recorded or settings}, {"data": settings}))
    found.sort(key=lambda difference: not difference.locates_data)
    return [one.key.split(".")[1] for one in found if one.on_resume is not OnResume.same]


def _digest(value: object) -> str:
    return str(value)[:_DIGEST_SHOWN]


def _refuse(wrong: Sequence[Violation], on_changed: OnChangedConfig) -> None:
    """Raise for violations with the remedy, or only warn of them if `on_changed` says so."""
    if wrong and on_changed is OnChangedConfig.error:
        raise ConfigError(Violation(one.key, f"{one.message}; {REMEDY}") for one in wrong)
    for violation in wrong:
        log.warning("resumed although %s", violation)


def check_base(resume_point: ResumePoint, now: Mapping[str, Any], on_changed: OnChangedConfig) -> None:
    """Refuse to go on training adapters beside other weights than they were trained with, wherever either lie.

    Args:
        resume_point: the checkpoint.
        now: digest and path of the base of this run.
        on_changed: whether to refuse, or only to warn.

    Raises:
        ConfigError: the base is another.
    """
    was = resume_point.manifest.base
    if was.get("digest") == now["digest"]:
        return
    message = (
        f"leads to another base than the adapters of the checkpoint were trained with, at {was.get('path')} (digest "
        f"{was.get('digest')} -> {now['digest']})"
    )
    _refuse([Violation("model.init_from", message)], on_changed)


def changed_data(manifest: Manifest, now: Mapping[str, Any]) -> list[str]:
    """What the data of a run differs in from that of a checkpoint; what the checkpoint does not say does not differ."""
    return [name for name in _DATA_KEYS if manifest.data.get(name) not in (None, now[name])]


class _Told(dict[str, Any]):
    """A mapping that refuses the checkpoint for what it lacks."""

    def __missing__(self, key: str) -> Any:
        message = f"leads to a checkpoint whose manifest has no {key} in its state; choose another checkpoint"
        raise ConfigError(Violation(_KEY, message))


def _told(value: Any) -> Any:
    return _Told({key: _told(item) for key, item in value.items()}) if isinstance(value, dict) else value


def past_its_end(resume_point: ResumePoint) -> ResumePoint:
    """The same checkpoint for a run that is to continue although early stopping had ended it."""
    return replace(
        resume_point,
        manifest=replace(resume_point.manifest, state={**resume_point.manifest.state, "stop_reason": None}),
    )


def is_longer(resume_point: ResumePoint | None, config: Mapping[str, Any]) -> bool:
    """Whether a finished run is asked to continue: a budget has grown, or is gone."""
    if resume_point is None:
        return False
    budgets = [d for d in differences(resume_point.manifest.config, config) if d.is_budget and d.was is not None]
    return any(d.now is None or d.now > d.was for d in budgets)


def restore_rng(resume_point: ResumePoint, world: World, seed: int) -> None:
    """Continue this rank's random numbers, or on another number of ranks start new ones that no rank has used."""
    file = resume_point.folder / f"rank-{world.rank:05d}.json"
    if resume_point.manifest.world_size == world.world_size and file.name in resume_point.manifest.files:
        set_rng_state(json.loads(read_text(file)), world.device)
    else:
        seed_rng(seed + 1 + world.rank + 1_000_003 * resume_point.manifest.step)


def _elsewhere(path: Path, world: World) -> ResumePoint:
    """Another run's checkpoint: this run does not end where that one did, and its directory lacks that one's best."""
    folder: Path | None = path.expanduser().resolve()  # of `latest`, the checkpoint that it leads to
    assert folder is not None
    if not os.path.lexists(folder / MANIFEST):
        folder = verify_newest(folder, world)
    elif damage := damage_together(folder, world):
        raise ConfigError(Violation(_KEY, f"is {path}, which is not whole: {'; '.join(damage)}"))
    if folder is None:
        raise ConfigError(Violation(_KEY, f"is {path}, where there is no whole checkpoint"))
    manifest = read_manifest(folder)
    state = {**manifest.state, "stop_reason": None, "best": {"step": None, "value": None}}
    return ResumePoint(folder, replace(manifest, state=state))


def _put_aside_newer(run_dir: Path, whole: Path | None) -> None:
    """Rename what is newer than the newest whole checkpoint; nothing if there is none."""
    for folder in list_checkpoints(run_dir) if whole is not None else ():
        if whole is not None and parse_step(folder) > parse_step(whole):
            folder.rename(_unused(folder.with_name(f"{folder.name}.corrupt")))


def _unused(path: Path) -> Path:
    """The path, or the first of those with a number after it that nothing has yet."""
    return next(p for p in chain([path], (path.with_name(f"{path.name}{n}") for n in count(2))) if not p.exists())
