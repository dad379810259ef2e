import io
import json
import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.run_dir.strict_json import encode
from foundry.tracking import metrics_file
from foundry.tracking.metrics_file import MetricsFile, iterate_metrics, read_curve, read_metrics, read_step


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_metrics_file_has_one_line_per_step_and_evaluation(events):
    observer = MetricsFile(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer.on_step(events.step(10, mfu=0.4, tflops=395.8))
    observer.on_evaluation(events.evaluation(10))
    lines = (events.run_dir / "metrics.jsonl").read_text().splitlines()
    step, evaluation = map(strict, lines)
    assert list(step)[:5] == ["step", "samples", "tokens", "epoch", "loss"]
    assert (step["step"], step["samples"]) == (10, 320)
    assert {"lr", "weight_decay", "grad_norm", "global_batch_size", "step_seconds", "peak_memory_bytes"} < set(step)
    assert (step["tokens_per_second"], step["mfu"], step["tflops"], step["accuracy"]) == (40960.0, 0.4, 395.8, 0.25)
    assert "samples_per_second" not in step
    assert evaluation == {"step": 10, "samples": 320, "val_loss": 3.5, "val_accuracy": 0.2}
    observer.on_end(events.end())


def test_metrics_file_omits_unknown_values(events):
    observer = MetricsFile(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer.on_step(events.step(1, tokens=None, tokens_per_second=None))
    observer.on_end(events.end())
    (record,) = read_metrics(events.run_dir)
    assert record["samples_per_second"] == 320.0
    assert not {"tokens", "tokens_per_second", "mfu", "tflops"} & set(record)


def test_metric_of_an_objective_does_not_replace_a_field(events):
    observer = MetricsFile(run_dir=events.run_dir)
    observer.on_step(events.step(1, loss=2.0, metrics={"loss": 9.0}))
    observer.on_evaluation(events.evaluation(1, val_loss=3.0, metrics={"step": 9.0}))
    assert [record.get("loss", record.get("val_loss")) for record in read_metrics(events.run_dir)] == [2.0, 3.0]


def test_nan_and_infinity_round_trip_as_strict_json(events):
    observer = MetricsFile(run_dir=events.run_dir)
    observer.on_step(events.step(1, loss=math.nan, grad_norm=math.inf, metrics={"margin": -math.inf}))
    written = strict((events.run_dir / "metrics.jsonl").read_text())
    assert (written["loss"], written["grad_norm"], written["margin"]) == ("NaN", "Infinity", "-Infinity")
    (record,) = read_metrics(events.run_dir / "metrics.jsonl")
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["margin"]) == (math.inf, -math.inf)


def test_torn_last_line_is_skipped_by_readers_and_removed_on_resume(events):
    observer = MetricsFile(run_dir=events.run_dir)
    observer.on_step(events.step(1))
    path = events.run_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1]
    resumed = MetricsFile(run_dir=events.run_dir)
    resumed.on_start(events.start(step=1))
    resumed.on_step(events.step(2))
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_resume_removes_records_of_steps_after_the_checkpoint(events):
    observer = MetricsFile(run_dir=events.run_dir)
    for step in (1, 2, 3):
        observer.on_step(events.step(step))
    observer.on_evaluation(events.evaluation(3))
    resumed = MetricsFile(run_dir=events.run_dir)
    resumed.on_start(events.start(step=2))
    resumed.on_step(events.step(4))
    path = events.run_dir / "metrics.jsonl"
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 4]


def test_resume_removes_a_line_longer_than_any_record_whole(events, monkeypatch):
    monkeypatch.setattr(metrics_file, "_LONGEST_LINE", 64)
    path = events.run_dir / "metrics.jsonl"
    hidden = '{"step": 1, "loss": 2.0}'  # as a separate line it would be a record
    path.write_text('{"step": 1, "loss": 1.0}\n' + "x" * 64 + hidden + "\n" + '{"step": 2, "loss": 1.0}\n')
    MetricsFile(run_dir=events.run_dir).on_start(events.start(step=2))
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n'


def test_resume_bounds_the_memory_for_one_line(tmp_path):
    class Unbounded(io.BytesIO):
        def __next__(self):
            raise AssertionError("a line of any length was read")

    lines = list(metrics_file._bounded_lines(Unbounded(b"x" * 3 * 2**20 + b"\n{}\n")))
    assert lines == [b"", b"{}\n"]


def test_read_metrics_keeps_the_last_record_of_a_repeated_step(events):
    observer = MetricsFile(run_dir=events.run_dir)
    for step in (1, 2, 3):
        observer.on_step(events.step(step, loss=float(step)))
    observer.on_evaluation(events.evaluation(2))
    observer.on_step(events.step(2, loss=20.0))
    assert [(r["step"], r.get("loss")) for r in read_metrics(events.run_dir)] == [
        (1, 1.0),
        (2, 20.0),
        (2, None),
        (3, 3.0),
    ]


def test_read_metrics_names_an_invalid_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not a record: b'nonsense"):
        read_metrics(path)


def test_metrics_file_on_a_full_disk_warns_once(events, caplog):
    observer = MetricsFile(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer._file.close()
    observer._file = open("/dev/full", "w")  # noqa: PTH123, SIM115
    for step in (1, 2):
        observer.on_step(events.step(step))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text


RECORDS = st.fixed_dictionaries(
    {"step": st.integers(0, 30)},
    optional={name: st.one_of(st.floats(), st.integers(), st.none()) for name in ("loss", "val_loss", "step_seconds")},
)


@given(st.lists(RECORDS, max_size=20), st.sampled_from(["loss", "val_loss", "step_seconds"]), st.integers(0, 30))
@settings(max_examples=examples(200))
def test_read_curve_and_read_step_agree_with_read_metrics(tmp_path_factory, records, name, step):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_text("".join(encode(record) + "\n" for record in records))
    # The later record of a repeated step may lack the field; then the earlier record's value counts.
    field = read_metrics(path, field=name)
    assert repr(read_curve(path, name)) == repr([(record["step"], record[name]) for record in field])
    assert repr(read_step(path, step)) == repr([record for record in iterate_metrics(path) if record["step"] == step])


def test_read_step_matches_whole_numbers_with_any_spacing(tmp_path):
    lines = ['{"step":1,"val_loss":5}', '{"step": 11, "val_loss": 6}', '{"val_loss": 7, "step": 1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [record["val_loss"] for record in read_step(tmp_path, 1)] == [5, 7]


def test_read_curve_needs_little_memory(tmp_path):
    """As dictionaries, a million records would take two gigabytes."""
    record = {f"metric_{number}": number / 7 for number in range(20)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(encode({"step": step, "loss": step / 3, **record}) + "\n" for step in range(3000))
    peaks = []
    for read in (lambda: read_curve(tmp_path, "loss"), lambda: read_step(tmp_path, 7), lambda: read_metrics(tmp_path)):
        tracemalloc.start()
        assert read()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] < peaks[2] / 5
