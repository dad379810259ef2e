"""Files of a sweep's report: report.csv, report.json and report.png in the sweep's directory."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.files import UnsafeFileError, write_atomically
from foundry.run_dir.outputs import Recognizer, has_columns, has_keys, is_picture, refusal
from foundry.run_dir.strict_json import encode, flat
from foundry.sweeps.reading import JobReport, SweepReport
from foundry.sweeps.seeds import seed_groups

CSV, JSON, PICTURE = "report.csv", "report.json", "report.png"
"""Names of the report files in the sweep's directory."""

_FACTS = ("job", "state", "step", "total_steps", "seconds", "note", "run_dir")
_RECOGNIZERS: Mapping[str, Recognizer] = {
    CSV: has_columns("job", "state", "run_dir"),
    JSON: has_keys("metric", "direction", "counts", "jobs"),
    PICTURE: is_picture,
}


def write_files(sweep: SweepReport, *, picture: bool = True) -> list[Path]:
    """Write all report files; the plot, which takes the longest, is optional.

    Raises:
        ConfigError: if a file with the name of a report file exists that is not a report.
        OSError: if the directory is not writable, or contains a folder with the name of a report file.
    """
    if folders := [path for name in _RECOGNIZERS if (path := sweep.folder / name).is_dir()]:
        raise UnsafeFileError(folders[0], "a folder")
    written = [name for name in _RECOGNIZERS if picture or name != PICTURE]
    reasons = [refusal(sweep.folder / name, is_earlier=_RECOGNIZERS[name]) for name in written]
    if wrong := [Violation(name, why) for name, why in zip(written, reasons, strict=True) if why is not None]:
        raise ConfigError(wrong)
    files = [write_csv(sweep), write_json(sweep)]
    return [*files, write_picture(sweep)] if picture else files


def write_csv(sweep: SweepReport) -> Path:
    """Write report.csv with a row per job: swept values, state, numbers of the result; missing values are empty."""
    results = [
        {name: value for name, value in flat(job.result) if isinstance(value, int | float)} for job in sweep.jobs
    ]
    measured = list(dict.fromkeys(name for result in results for name in result if name not in (*_FACTS, "metric")))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *sweep.names, *_FACTS[1:], "metric", *measured])
    for job, result in zip(sweep.jobs, results, strict=True):
        facts = _facts(sweep, job)
        values = [job.values.get(key) for key in sweep.names]
        numbers = [result.get(name) for name in measured]
        writer.writerow([job.index, *values, *(facts[name] for name in _FACTS[1:]), job.metric, *numbers])
    path = sweep.folder / CSV
    write_atomically(path, text.getvalue())
    return path


def write_json(sweep: SweepReport) -> Path:
    """Write the result of `report_facts` as JSON and return the file's path."""
    path = sweep.folder / JSON
    write_atomically(path, encode(report_facts(sweep)) + "\n")
    return path


def report_facts(sweep: SweepReport) -> dict[str, Any]:
    """Return the content of report.json: metric, best job, state and overrides of each job, and results over seeds."""
    best = sweep.best
    return {
        "metric": sweep.metric,
        "direction": "minimize" if sweep.minimize else "maximize",
        "which": sweep.which.value,
        "counts": sweep.counts,
        "is_going": sweep.is_going,
        "best": None if best is None else best.index,
        "repeat": None if best is None else sweep.repeat(best),
        "jobs": [
            _facts(sweep, job)
            | {
                "metric": job.metric,
                "swept": {key: job.values.get(key) for key in sweep.names},
                "overrides": job.job.swept,
                **({} if job.rung is None else {"rung": job.rung}),
                "result": job.result,
            }
            for job in sweep.jobs
        ],
        "over_seeds": [
            {
                "swept": dict(group.values),
                "jobs": [job.index for job in group.jobs],
                "measured": len(group.measured),
                "mean": group.mean,
                "std": group.std,
            }
            for group in seed_groups(sweep)
        ],
    }


def write_picture(sweep: SweepReport) -> Path:
    """Write the figure from `sweep_figure` and return the file's path."""
    from foundry.sweeps.figure import sweep_figure
    from foundry.tracking.plot_style import save_figure

    path = sweep.folder / PICTURE
    save_figure(sweep_figure(sweep), path)
    return path


def _facts(sweep: SweepReport, job: JobReport) -> dict[str, Any]:
    return {
        "job": job.index,
        "state": job.state,
        "step": job.step,
        "total_steps": job.total_steps,
        "seconds": job.seconds,
        "note": job.note,
        "run_dir": os.path.relpath(job.run_dir, sweep.folder),
    }
