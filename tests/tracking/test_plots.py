import math
import sys
from subprocess import run

import pytest

from foundry.tracking.metrics_file import MetricsFile
from foundry.tracking.plots import Plots, loss_figure, smoothed
from foundry.tracking.schedule_figure import schedule_figure
from foundry.tracking.success_figure import success_figure
from foundry.training.events import Evaluated, Phase, PlannedUpdate


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_pictures_at_each_evaluation_and_at_the_end(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer.on_step(events.step(1))
    assert not (events.run_dir / "plots").exists()
    observer.on_evaluation(events.evaluation(1))
    assert is_png(events.run_dir / "plots/loss.png")
    assert is_png(events.run_dir / "plots/schedule.png")
    (events.run_dir / "plots/loss.png").unlink()
    observer.on_end(events.end())
    assert sorted(path.name for path in (events.run_dir / "plots").iterdir()) == ["loss.png", "schedule.png"]


def test_a_run_directory_that_was_just_moved_does_not_come_back(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    events.run_dir.rename(events.run_dir.with_name("moved"))
    observer.on_evaluation(events.evaluation(1))
    assert not events.run_dir.exists()


def test_evaluations_in_quick_succession_are_drawn_once(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer.on_evaluation(events.evaluation(1))
    (events.run_dir / "plots/loss.png").unlink()
    observer.on_evaluation(events.evaluation(2))
    assert not (events.run_dir / "plots/loss.png").exists()
    observer._next_drawing = 0.0
    observer.on_evaluation(events.evaluation(3))
    assert is_png(events.run_dir / "plots/loss.png")


def test_a_resumed_run_shows_its_whole_history(events):
    file = MetricsFile(run_dir=events.run_dir)
    for step in (1, 2, 3):
        file.on_step(events.step(step))
    file.on_evaluation(events.evaluation(3))
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    assert list(observer._loss) == [1, 2, 3]
    assert observer._measured == {"val_loss": {3: 3.5}}


def test_success_is_drawn_with_its_interval(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    rates = {4: (0.1, 0.02, 0.3), 8: (0.5, 0.3, 0.7)}
    for step, (rate, low, high) in rates.items():
        metrics = {"val_loss": 1.0, "val_success": rate, "val_success_low": low, "val_success_high": high}
        observer.on_evaluation(Evaluated(step=step, samples=step, metrics=metrics))
    observer.on_end(events.end())
    assert is_png(events.run_dir / "plots/success.png")
    (axes,) = success_figure(observer._measured).axes
    assert list(axes.lines[0].get_xdata()) == [4, 8]
    assert list(axes.lines[0].get_ydata()) == [0.1, 0.5]
    band, bars = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(4, 0.02), (4, 0.3), (8, 0.3), (8, 0.7)}
    assert [segment.tolist() for segment in bars.get_segments()] == [[[4, 0.02], [4, 0.3]], [[8, 0.3], [8, 0.7]]]
    assert axes.get_legend().get_texts()[0].get_text() == "success 0.500"


def test_the_smoothed_line_ignores_a_spike_and_nan():
    assert smoothed([3.0] * 50, range(50)) == [3.0] * 50
    values = [5.0, 4.0, 3.0, math.nan, 100.0, 2.0, 1.0]
    assert smoothed(values, [0, 2, 4, 6]) == [5.0, 4.5, 2.5, 1.0]
    assert math.isnan(smoothed([math.nan], [0])[0])


def test_a_spike_does_not_flatten_the_curve_and_is_said():
    points = [(step, 2.0 + 1.0 / step) for step in range(1, 301)]
    points[100] = (101, 500.0)
    points[200] = (201, math.nan)
    (axes,) = loss_figure(points, [(300, 2.1)], 2.6).axes
    assert axes.get_ylim()[1] < 6
    assert [text.get_text() for text in axes.texts] == ["1 above, up to 500"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any(label.startswith("unigram entropy 2.600") for label in labels)
    assert "not finite: 1" in labels
    assert "held out 2.1000" in labels


def test_a_usual_curve_is_shown_whole():
    points = [(step, 2.0 + 3.0 / step**0.5) for step in range(1, 301)]
    (axes,) = loss_figure(points, [], None).axes
    assert axes.get_ylim()[1] > 5.0
    assert not axes.texts


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, math.nan)], [(1, 2.0), (2, 2.0)]])
def test_few_points_are_no_error(points, tmp_path):
    loss_figure(points, [], None).savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def updates(count, last_batch=8):
    return [
        PlannedUpdate(
            step=s, samples=8 * s, global_batch_size=8 if s < 6 else last_batch, lr=1e-3 * s, weight_decay=0.1 / s
        )
        for s in range(1, count + 1)
    ]


def test_the_schedule_shows_rate_decay_and_batch_size_and_how_far_the_run_has_come():
    phases = [Phase(name="warmup", first_step=1, last_step=4), Phase(name="decay", first_step=5, last_step=10)]
    rate, decay, batch = schedule_figure(updates(10, 16), phases, 4).axes
    assert list(rate.lines[0].get_ydata()) == [1e-3 * s for s in range(1, 11)]
    assert list(decay.lines[0].get_ydata()) == [0.1 / s for s in range(1, 11)]
    assert list(batch.lines[0].get_ydata()) == [8] * 5 + [16] * 5
    assert {text.get_text() for text in rate.texts} == {"warmup 1-4", "decay 5-10"}
    assert batch.get_xlabel() == "optimizer step (dotted: step 4)"
    assert [axes.lines[-1].get_xdata()[0] for axes in (rate, decay, batch)] == [4] * 3
    assert len(schedule_figure(updates(10), phases, 10).axes[0].lines) == 1


def test_phases_too_short_for_their_names_are_beside_the_title():
    phases = [Phase(name="warmup", first_step=1, last_step=1), Phase(name="stable", first_step=2, last_step=100)]
    rate = schedule_figure(updates(100), phases).axes[0]
    assert [text.get_text() for text in rate.texts] == ["stable 2-100"]
    assert rate.get_title(loc="right") == "warmup 1-1"


def test_the_schedule_of_one_step(tmp_path):
    schedule_figure(updates(1), []).savefig(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_importing_the_observers_loads_neither_torch_nor_mlflow_nor_matplotlib():
    code = (
        "import sys; import foundry.tracking.plots, foundry.tracking.mlflow.tracker, foundry.tracking.status_file;"
        "sys.exit(' '.join({'matplotlib', 'mlflow', 'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
