import math
import sys
from subprocess import run

import pytest

from foundry.core.events import Evaluated, Phase, PlannedUpdate
from foundry.tasks.robots.success_figure import success_figure
from foundry.tracking.metrics_figure import metrics_figure
from foundry.tracking.metrics_file import MetricsFile
from foundry.tracking.norms_figure import norms_figure
from foundry.tracking.plot_style import smoothed
from foundry.tracking.plots import Plots, loss_figure
from foundry.tracking.schedule_figure import schedule_figure


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_plots_are_drawn_at_each_evaluation_and_at_the_end(events):
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


def test_plots_do_not_recreate_a_moved_run_directory(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    events.run_dir.rename(events.run_dir.with_name("moved"))
    observer.on_evaluation(events.evaluation(1))
    assert not events.run_dir.exists()


def test_plots_are_drawn_once_for_evaluations_in_quick_succession(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer.on_evaluation(events.evaluation(1))
    (events.run_dir / "plots/loss.png").unlink()
    observer.on_evaluation(events.evaluation(2))
    assert not (events.run_dir / "plots/loss.png").exists()
    observer._next_drawing = 0.0
    observer.on_evaluation(events.evaluation(3))
    assert is_png(events.run_dir / "plots/loss.png")


def test_plots_of_a_resumed_run_have_its_whole_history(events):
    file = MetricsFile(run_dir=events.run_dir)
    for step in (1, 2, 3):
        file.on_step(events.step(step))
    file.on_evaluation(events.evaluation(3))
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    assert list(observer._logged["loss"]) == [1, 2, 3]
    assert (observer._measured["val_loss"], observer._measured["val_accuracy"]) == ({3: 3.5}, {3: 0.2})


def test_success_figure_draws_the_confidence_interval(events):
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


def test_smoothed_ignores_spikes_and_nan():
    assert smoothed([3.0] * 50, range(50)) == [3.0] * 50
    values = [5.0, 4.0, 3.0, math.nan, 100.0, 2.0, 1.0]
    assert smoothed(values, [0, 2, 4, 6]) == [5.0, 4.5, 2.5, 1.0]
    assert math.isnan(smoothed([math.nan], [0])[0])


def test_loss_figure_clips_a_spike_and_labels_it():
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


def test_loss_figure_shows_a_usual_curve_without_clipping():
    points = [(step, 2.0 + 3.0 / step**0.5) for step in range(1, 301)]
    (axes,) = loss_figure(points, [], None).axes
    assert axes.get_ylim()[1] > 5.0
    assert not axes.texts


def test_loss_figure_of_few_points_clips_only_extreme_values():
    points = [(1, 1350.0), (10, 1750.0), (20, 1630.0), (30, 1580.0), (40, 3100.0)]
    (axes,) = loss_figure(points, [], None).axes
    assert axes.get_ylim()[1] > 3100
    assert not axes.texts
    (axes,) = loss_figure([*points, (50, 1e6)], [], None).axes
    assert [text.get_text() for text in axes.texts] == ["1 above, up to 1e+06"]


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, math.nan)], [(1, 2.0), (2, 2.0)]])
def test_loss_figure_accepts_one_or_two_points(points, tmp_path):
    loss_figure(points, [], None).savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def texts(holder):
    return [text.get_text() for text in holder]


def test_loss_figure_labels_its_lines_and_the_run():
    figure = loss_figure([(step, 2.0 + step % 3) for step in range(1, 101)], [(100, 2.5)], None, "3: lr=0.1")
    assert texts(figure.axes[0].get_legend().get_texts()) == [
        "training, each logged step 3.0000",
        "its running median",
        "held out 2.5000",
    ]
    assert texts(figure.texts) == ["Loss", "3: lr=0.1"]


@pytest.mark.parametrize(
    ("last", "labels"),
    [
        (1, ["1"]),
        (5, ["1", "2", "3", "4", "5"]),
        (200, ["0", "50", "100", "150", "200"]),
        (10**6, ["0", "200k", "400k", "600k", "800k", "1M"]),
    ],
)
def test_step_ticks_are_round_integers(last, labels):
    points = [(step, 1.0 / step) for step in range(1, last + 1, max(1, last // 999))]
    figure = loss_figure([*points, (last, 0.0)], [], None)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    ticks = axes.xaxis.get_major_ticks()
    assert [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high] == labels


def test_plots_use_the_run_name_of_trackers(events):
    for observer, name in (
        (Plots(run_dir=events.run_dir), events.run_dir.name),
        (Plots(run_dir=events.run_dir, run_name="mine $x"), "mine $x"),
    ):
        observer.on_start(events.start())
        assert observer._name() == name
        observer.on_end(events.end())


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_metrics_figure_has_a_panel_per_changing_metric():
    steps = range(1, 51)
    logged = {
        "loss": {step: 1.0 / step for step in steps},
        "grad_norm": {step: 100.0 if step == 7 else 1.0 + step % 2 for step in steps},
        "lr": dict.fromkeys(steps, 1e-3),
        "tokens_per_second": {step: 1e5 + step for step in steps},
        "tokens": {step: 100 * step for step in steps},
        "reward": {step: step / 50 for step in steps},
        "fixed": dict.fromkeys(steps, 3.0),
        "broken": dict.fromkeys(steps, math.nan),
        "grad_norm/head": {step: float(step) for step in steps},
    }
    measured = {"val_loss": {25: 1.0, 50: 2.0}, "val_reward": {25: 0.4, 50: 0.9}, "val_bleu": {25: 1.0, 50: 2.0}}
    measured["val_success"] = {25: 0.0, 50: 1.0}
    figure = metrics_figure(logged, measured, "a run")
    assert titles(figure) == ["gradient norm", "tokens/s", "reward", "broken", "val_bleu"]
    norm, _, reward, broken, alone = figure.axes
    assert norm.get_yscale() == "log"
    assert [list(line.get_ydata()) for line in reward.lines][-1] == [0.4, 0.9]
    assert broken.get_title(loc="right") == "50 not finite"
    assert [list(line.get_ydata()) for line in alone.lines] == [[1.0, 2.0]]
    assert texts(figure.legends[0].get_texts()) == ["each logged step", "running median", "held out"]
    assert "a run" in texts(figure.texts)


def test_metrics_figure_is_none_without_changes_and_limits_its_panels():
    assert metrics_figure({"lr": {1: 0.1, 2: 0.1}, "loss": {1: 3.0, 2: 2.0}}, {}) is None
    many = metrics_figure({f"metric {n}": {1: 0.0, 2: 1.0} for n in range(20)}, {}, "a run")
    assert len(many.axes) == 12
    assert "a run (8 more in metrics.jsonl)" in texts(many.texts)


def test_norms_figure_draws_gradient_norms_and_relative_updates(events):
    observer = Plots(run_dir=events.run_dir)
    observer.on_start(events.start())
    blocks = [f"layers.{n}" for n in range(30)]
    for step in (1, 10, 20):
        norms = {"grad_norm": 2.0 * step, "weight_norm": 4.0, "update_norm": 0.1 * step}
        observer.on_step(
            events.step(step, metrics={f"{name}/{block}": v for name, v in norms.items() for block in blocks})
        )
    observer.on_end(events.end())
    assert is_png(events.run_dir / "plots/norms.png")
    left, right = norms_figure(observer._logged).axes
    assert [len(axes.lines) for axes in (left, right)] == [30, 30]
    assert list(left.lines[0].get_ydata()) == [2, 20, 40]
    assert list(right.lines[29].get_ydata()) == pytest.approx([0.025, 0.25, 0.5])
    named = texts(left.figure.legends[0].get_texts())
    assert (named[0], named[-1], len(named)) == ("layers.0", "layers.29", 12)
    assert norms_figure({"grad_norm": {1: 1.0}}) is None


def test_norms_figure_omits_relative_updates_of_zero_weights():
    logged = {"grad_norm/head": {1: 0.5}, "weight_norm/head": {1: 0.0}, "update_norm/head": {1: 0.1}}
    left, right = norms_figure(logged).axes
    assert (list(left.lines[0].get_ydata()), list(right.lines[0].get_ydata())) == ([0.5], [])


def updates(count, last_batch=8):
    return [
        PlannedUpdate(
            step=s, samples=8 * s, global_batch_size=8 if s < 6 else last_batch, lr=1e-3 * s, weight_decay=0.1 / s
        )
        for s in range(1, count + 1)
    ]


def test_schedule_figure_draws_lr_weight_decay_batch_size_and_progress():
    phases = [Phase(name="warmup", first_step=1, last_step=4), Phase(name="decay", first_step=5, last_step=10)]
    rate, decay, batch = schedule_figure(updates(10, 16), phases, 4).axes
    assert list(rate.lines[0].get_ydata()) == [1e-3 * s for s in range(1, 11)]
    assert list(decay.lines[0].get_ydata()) == [0.1 / s for s in range(1, 11)]
    assert list(batch.lines[0].get_ydata()) == [8] * 5 + [16] * 5
    assert {text.get_text() for text in rate.texts} == {"warmup 1-4", "decay 5-10"}
    assert batch.get_xlabel() == "optimizer step (dotted: step 4)"
    assert [axes.lines[-1].get_xdata()[0] for axes in (rate, decay, batch)] == [4] * 3
    assert len(schedule_figure(updates(10), phases, 10).axes[0].lines) == 1


def test_schedule_figure_names_constant_values_instead_of_drawing_them():
    fixed = [PlannedUpdate(step=s, samples=8 * s, global_batch_size=8, lr=1.0 / s, weight_decay=0.1) for s in (1, 2, 3)]
    figure = schedule_figure(fixed, [], 0, "a run")
    assert [axes.get_ylabel() for axes in figure.axes] == ["learning rate"]
    assert texts(figure.texts) == ["Schedule", "a run, weight decay 0.1, global batch 8"]


def test_schedule_figure_puts_names_of_short_phases_next_to_the_title():
    phases = [Phase(name="warmup", first_step=1, last_step=1), Phase(name="stable", first_step=2, last_step=100)]
    rate = schedule_figure(updates(100), phases).axes[0]
    assert [text.get_text() for text in rate.texts] == ["stable 2-100"]
    assert rate.get_title(loc="right") == "warmup 1-1"


def test_schedule_figure_accepts_a_single_step(tmp_path):
    schedule_figure(updates(1), []).savefig(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_observers_import_neither_torch_nor_mlflow_nor_matplotlib():
    code = (
        "import sys; import foundry.tracking.plots, foundry.tracking.mlflow.tracker, foundry.tracking.status_file;"
        "sys.exit(' '.join({'matplotlib', 'mlflow', 'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    process = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr.strip()) == (0, "")
