"""A run directory that holds a finished run answers with its result, for the settings that gave it and no others."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foundry.checkpoint.resume_point import ResumePoint, changed_data
from foundry.config.record.frozen import read_recorded
from foundry.config.record.resume_compat import differences
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.strict_json import encode

log = logging.getLogger(__name__)


def check_finished(
    config: Config,
    recorded: Mapping[str, Any],
    config_hash: str,
    run_dir: Path,
    resume_point: ResumePoint | None,
    result: Mapping[str, Any],
    identity: Callable[[], Mapping[str, Any]],
) -> None:
    """Refuse the result of a finished run to other settings than its own.

    Args:
        config: of this run.
        recorded: the same as a manifest holds it.
        config_hash: of the same.
        run_dir: holds the finished run.
        resume_point: its newest checkpoint, if it kept any.
        result: what its result.json says.
        identity: of this run's data; asked only where nothing but the place of the data has changed.

    Raises:
        ConfigError: with a line for every setting with which the result would be another.
    """
    if result.get("config_hash") != config_hash:
        # A launcher writes the settings of this run into config.yaml; a checkpoint may be of an earlier start.
        is_resume_points = resume_point is not None and resume_point.manifest.config_hash == result.get("config_hash")
        was = resume_point.manifest.config if resume_point is not None and is_resume_points else read_recorded(run_dir)
        if was is None:
            message = f"is {run_dir}, which holds a finished run of other settings; choose another hydra.run.dir"
            raise ConfigError(Violation("hydra.run.dir", message))
        found = differences(json.loads(encode(was)), recorded, config)
        changed = [difference for difference in found if difference.changes_result]
        if (
            resume_point is not None
            and resume_point.manifest.data
            and all(difference.locates_data for difference in changed)
        ):
            changed = changed if changed and changed_data(resume_point.manifest, identity()) else []
        if changed:
            raise ConfigError(difference.of_finished(run_dir) for difference in changed)
    log.warning("%s holds a finished run; choose another hydra.run.dir to train again", run_dir)
