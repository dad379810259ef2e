"""`plan.measured`: the step time that a plan takes from the metrics of a run."""

import pytest

from foundry.commands.plan import _median_step_seconds
from foundry.core.errors import ConfigError


def write(folder, *values):
    lines = [f'{{"step": {step}, "step_seconds": {value}}}\n' for step, value in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_measured_step_time_is_the_median_without_the_first_step(tmp_path):
    write(tmp_path, 9, 1, 2, 4, "NaN", '"fast"')
    assert _median_step_seconds(str(tmp_path)) == 2


@pytest.mark.parametrize("values", [(), (1,), ("NaN", "NaN"), ('"x"', '"y"', "null", "[1]", 3)])
def test_metrics_without_step_times_are_rejected(tmp_path, values):
    write(tmp_path, *values)
    with pytest.raises(
        ConfigError, match=r"^plan\.measured: is .*, whose metrics\.jsonl has fewer than two logged steps"
    ):
        _median_step_seconds(str(tmp_path))


def test_damaged_metrics_are_rejected_with_file_and_line(tmp_path):
    write(tmp_path, 1, 2, "}", 3)
    with pytest.raises(
        ConfigError, match=r"cannot be read: .*/metrics\.jsonl:3 is not a record: .*; choose another run"
    ):
        _median_step_seconds(str(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match=r"cannot be read: .*/metrics\.jsonl.*; choose another run"):
        _median_step_seconds(str(tmp_path))
