"""Check whether the result of a finished run in a run directory is valid for the current settings."""

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
    """Check that the settings of this run would give the result that the finished run recorded.

    Args:
        config: configuration of this run.
        recorded: configuration of this run, in the form that a manifest records.
        config_hash: hash of this run's configuration.
        run_dir: directory of the finished run.
        resume_point: newest checkpoint of the finished run; None if it kept no checkpoint.
        result: content of the finished run's result.json.
        identity: returns the identity of this run's data; called only if no setting changed except the location of the
            data.

    Raises:
        ConfigError: if settings changed that affect the result; each has a line in the message.
    """
    if result.get("config_hash") != config_hash:
        # Prefer the settings in the checkpoint, since a launcher may have written those of this run to config.yaml. But
        # the checkpoint may be from an earlier start of the run than the result.
        is_resume_points = resume_point is not None and resume_point.manifest.config_hash == result.get("config_hash")
        was = resume_point.manifest.config if resume_point is not None and is_resume_points else read_recorded(run_dir)
        if was is None:
            message = f"is {run_dir}, which holds a finished run with other settings; choose another hydra.run.dir"
            raise ConfigError(Violation("hydra.run.dir", message))
        all_differences = differences(json.loads(encode(was)), recorded, config)
        changed = [difference for difference in all_differences if difference.changes_result]
        if (
            resume_point is not None
            and resume_point.manifest.data
            and all(difference.locates_data for difference in changed)
        ):
            changed = changed if changed and changed_data(resume_point.manifest, identity()) else []
        if changed:
            raise ConfigError(difference.of_finished(run_dir) for difference in changed)
    log.warning("%s holds a finished run; choose another hydra.run.dir to train again", run_dir)
