import math

import pytest
from matplotlib.colors import to_hex
from support.sweep_dirs import SweepDir

from foundry.sweeps.figure import sweep_figure
from foundry.sweeps.panels import Frame
from foundry.sweeps.reading import read_sweep
from foundry.tracking.plot_style import ORANGE, RED, save_figure


@pytest.fixture
def sweep_dir(tmp_path, events):
    return SweepDir(tmp_path / "sweep", type(events))


def drawn(sweep_dir):
    """The panels, once the picture is known to be one."""
    figure = sweep_figure(read_sweep(sweep_dir.folder))
    path = sweep_dir.folder / "report.png"
    save_figure(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    return figure.axes


def marks(axes, marker):
    return [
        (float(x), float(y))
        for line in axes.lines
        if line.get_marker() == marker
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def message(axes):
    return [text.get_text() for text in axes.texts]


def test_one_number_over_a_wide_span_is_drawn_on_a_logarithmic_axis(sweep_dir):
    for lr, loss in (("1e-4", 2.5), ("1e-3", 1.5), ("1e-2", 2.0)):
        sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, loss))
    panel, curves = drawn(sweep_dir)
    assert (panel.get_xscale(), panel.get_xlabel(), panel.get_ylabel()) == ("log", "lr", "val_loss")
    assert marks(panel, "*") == [(1e-3, 1.5)]
    assert sorted(marks(panel, "o")) == [(1e-4, 2.5), (1e-2, 2.0)]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.0001", "0.001", "0.01"]
    best = max(curves.lines, key=lambda line: line.get_linewidth())
    assert (to_hex(best.get_color()), list(best.get_ydata())) == (ORANGE, [3.0, 1.5])
    assert message(curves) == ["job 1"]


def test_a_line_shows_the_interval_of_a_metric(sweep_dir):
    for lr, loss in (("1e-3", 1.5), ("2e-3", 2.0)):
        sweep_dir.add_interval(sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, loss)), (2.5, 3.5), (loss - 1, loss + 1))
    panel, _ = drawn(sweep_dir)
    lines = [list(line.get_ydata()) for line in panel.lines if len(line.get_xdata()) == 2]
    assert sorted(lines) == [[0.5, 2.5], [1.0, 3.0]]
    low, high = panel.get_ylim()
    assert low < 0.5
    assert high > 3.0


def test_a_narrow_span_is_drawn_on_a_linear_axis(sweep_dir):
    for lr in ("1e-3", "2e-3", "3e-3"):
        sweep_dir.job(f"hparams.lr={lr}")
    assert drawn(sweep_dir)[0].get_xscale() == "linear"


def test_a_failed_job_is_crossed_at_the_bad_end(sweep_dir):
    sweep_dir.job("hparams.lr=1", losses=(3.0, 2.0))
    sweep_dir.job("hparams.lr=2", losses=(3.0, 2.2))
    sweep_dir.job("hparams.lr=3", state="failed", losses=(3.0, math.nan))
    panel, curves = drawn(sweep_dir)
    ((x, height),) = marks(panel, "x")
    assert x == 3
    assert height > 0.9
    assert len(marks(panel, "o")) == 1
    assert RED in {to_hex(line.get_color()) for line in curves.lines}


def test_a_metric_that_is_not_finite_is_crossed_too(sweep_dir):
    for lr, loss in (("1", 2.0), ("2", 2.5), ("3", math.nan), ("4", math.inf)):
        sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, loss))
    panel, _ = drawn(sweep_dir)
    assert [x for x, _ in marks(panel, "x")] == [4, 3] or [x for x, _ in marks(panel, "x")] == [3, 4]
    assert panel.get_xlim()[1] > 4
    legend = [text.get_text() for text in panel.figure.legends[0].get_texts()]
    assert legend == ["best", "2 finished", "2 diverged"]


def test_pruned_jobs_are_hollow_and_do_not_widen_the_frame(sweep_dir):
    for lr in range(1, 4):
        sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, 1.0 + lr / 10))
    sweep_dir.prune(sweep_dir.job("hparams.lr=9", losses=(3.0,)))
    panel, _ = drawn(sweep_dir)
    assert panel.get_ylim()[1] < 1.5
    (pruned,) = [line for line in panel.lines if line.get_marker() == "^"]
    assert (list(pruned.get_xdata()), to_hex(pruned.get_markerfacecolor())) == ([9], "#ffffff")
    assert "1 pruned" in [text.get_text() for text in panel.figure.legends[0].get_texts()]


def test_keys_that_go_together_are_one_parameter(sweep_dir):
    for lr, clip in (("1e-3", "1.0"), ("3e-3", "0.5")):
        for seed, loss in ((0, 1.0), (1, math.nan)):
            overrides = (f"hparams.lr={lr}", f"hparams.grad_clip_norm={clip}", f"hparams.seed={seed}")
            sweep_dir.job(*overrides, losses=(3.0, loss + float(lr)))
    panel, seeds, _ = drawn(sweep_dir)
    assert (panel.get_xlabel(), seeds.get_xlabel()) == ("lr, grad_clip_norm", "seed")
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.001, 1", "0.003, 0.5"]
    assert len(marks(panel, "x")) == len(marks(seeds, "x")) == 2


def test_numbers_that_lie_evenly_but_for_a_small_one_have_a_linear_axis(sweep_dir):
    for number in (0.001, 0.1, 0.2, 0.3, 0.4):
        sweep_dir.job(f"optimizer.weight_decay={number}")
    assert drawn(sweep_dir)[0].get_xscale() == "linear"


def test_two_parameters_have_a_panel_each(sweep_dir):
    for number in range(6):
        sweep_dir.job(f"hparams.lr={0.1 * number}", f"optimizer.weight_decay={number**2}", losses=(2.0, number + 1.0))
    assert [axes.get_xlabel() for axes in drawn(sweep_dir)] == ["lr", "weight_decay", "optimizer step"]


def test_three_parameters_and_words_among_them(sweep_dir):
    for optimizer in ("adamw", "muon"):
        for lr in (1, 2):
            for seed in (0, 1):
                sweep_dir.job(
                    f"optimizer={optimizer}", f"hparams.lr={lr}", f"hparams.seed={seed}", losses=(2.0, lr + seed)
                )
    panels = drawn(sweep_dir)
    assert [axes.get_xlabel() for axes in panels] == ["optimizer", "lr", "seed", "optimizer step"]
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["adamw", "muon"]
    places = sorted(x for x, _ in marks(panels[0], "o") + marks(panels[0], "*"))
    assert len(set(places)) == 8  # side by side
    assert all(abs(x - round(x)) < 0.3 for x in places)


@pytest.mark.parametrize("state", ["finished", "queued", "failed", "stopped"])
def test_a_single_job_in_any_state_has_a_picture(sweep_dir, state):
    sweep_dir.job("hparams.lr=1", state=state)
    (panel,) = drawn(sweep_dir)
    assert message(panel) == (["no learning curves"] if state == "queued" else [] if state == "failed" else ["job 0"])


def test_before_the_first_evaluations_the_training_loss_is_shown(sweep_dir):
    sweep_dir.job("hparams.lr=1", state="stopped", losses=(3.0,))
    sweep_dir.job("hparams.lr=2", state="queued")
    assert drawn(sweep_dir)[-1].get_ylabel() == "training loss"


def test_many_parameters_and_many_jobs(sweep_dir):
    for number in range(40):
        sweep_dir.job(*(f"group.key_{key}={number * key}" for key in range(1, 12)), losses=(2.0, 1.0 + number))
    assert len(drawn(sweep_dir)) == 9


def test_a_frame_is_not_flattened_by_a_few():
    values = [1.0, 1.1, 1.2, 1.3, 1.25, 1.15, 15.0]
    frame = Frame.around(values)
    assert not frame.is_log
    assert 0.9 < frame.low < 1.0
    assert 1.3 < frame.high < 3.0
    assert Frame.around([0.01, 1.0]).is_log
    same = Frame.around([2.0, 2.0])
    assert same.low < 2.0 < same.high
