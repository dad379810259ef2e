import itertools
import math
import shutil

import pytest
from matplotlib.colors import to_hex
from support.sweep_dirs import SweepDir

from foundry.sweeps.curves import spread
from foundry.sweeps.figure import sweep_figure
from foundry.sweeps.reading import read_sweep
from foundry.sweeps.scales import Frame
from foundry.tracking.plot_style import ORANGE, RED, save_figure


@pytest.fixture
def sweep_dir(tmp_path, events):
    return SweepDir(tmp_path / "sweep", type(events))


def draw_panels(sweep_dir):
    """Draw the figure, check that it is saved as a PNG, and return its panels."""
    figure = sweep_figure(read_sweep(sweep_dir.folder))
    path = sweep_dir.folder / "report.png"
    save_figure(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    return figure.axes


def undrawn(sweep_dir):
    """Return the panels of the figure of a sweep without saving the figure."""
    return sweep_figure(read_sweep(sweep_dir.folder)).axes


def marks(axes, marker):
    return [
        (float(x), float(y))
        for line in axes.lines
        if line.get_marker() == marker
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def message(axes):
    return [text.get_text() for text in axes.texts]


def test_numeric_parameter_with_a_wide_range_has_a_log_axis(sweep_dir):
    for lr, loss in (("1e-4", 2.5), ("1e-3", 1.5), ("1e-2", 2.0)):
        sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, loss))
    panel, curves = draw_panels(sweep_dir)
    assert (panel.get_xscale(), panel.get_xlabel(), panel.get_ylabel()) == ("log", "lr", "val_loss")
    assert marks(panel, "*") == [(1e-3, 1.5)]
    assert sorted(marks(panel, "o")) == [(1e-4, 2.5), (1e-2, 2.0)]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.0001", "0.001", "0.01"]
    best = max(curves.lines, key=lambda line: line.get_linewidth())
    assert (to_hex(best.get_color()), list(best.get_ydata())) == (ORANGE, [3.0, 1.5])
    assert message(curves) == ["0.001", "0.01", "0.0001", "lr"]  # lowest curve first, then the parameter's name


def test_metric_interval_is_drawn_as_a_vertical_line(sweep_dir):
    for lr, loss in (("1e-3", 1.5), ("2e-3", 2.0)):
        sweep_dir.add_interval(sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, loss)), (2.5, 3.5), (loss - 1, loss + 1))
    panel, _ = draw_panels(sweep_dir)
    lines = [list(line.get_ydata()) for line in panel.lines if len(line.get_xdata()) == 2]
    assert sorted(lines) == [[0.5, 2.5], [1.0, 3.0]]
    low, high = panel.get_ylim()
    assert low < 0.5
    assert high > 3.0


def test_numeric_parameter_with_a_narrow_range_has_a_linear_axis(sweep_dir):
    for lr in ("1e-3", "2e-3", "3e-3"):
        sweep_dir.job(f"hparams.lr={lr}")
    assert draw_panels(sweep_dir)[0].get_xscale() == "linear"


def test_failed_job_is_drawn_as_a_cross_at_the_worst_end(sweep_dir):
    sweep_dir.job("hparams.lr=1", losses=(3.0, 2.0))
    sweep_dir.job("hparams.lr=2", losses=(3.0, 2.2))
    sweep_dir.job("hparams.lr=3", state="failed", losses=(3.0, math.nan))
    panel, curves = draw_panels(sweep_dir)
    ((x, height),) = marks(panel, "x")
    assert x == 3
    assert height > 0.9
    assert len(marks(panel, "o")) == 1
    assert RED in {to_hex(line.get_color()) for line in curves.lines}


def test_job_with_a_non_finite_metric_is_drawn_as_a_cross(sweep_dir):
    for lr, loss in (("1", 2.0), ("2", 2.5), ("3", math.nan), ("4", math.inf)):
        sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, loss))
    panel, _ = draw_panels(sweep_dir)
    assert [x for x, _ in marks(panel, "x")] == [4, 3] or [x for x, _ in marks(panel, "x")] == [3, 4]
    assert panel.get_xlim()[1] > 4
    legend = [text.get_text() for text in panel.figure.legends[0].get_texts()]
    assert legend == ["best", "2 finished", "2 diverged"]


def test_pruned_jobs_are_hollow_and_do_not_extend_the_axis(sweep_dir):
    for lr in range(1, 4):
        sweep_dir.job(f"hparams.lr={lr}", losses=(3.0, 1.0 + lr / 10))
    sweep_dir.prune(sweep_dir.job("hparams.lr=9", losses=(3.0,)))
    panel, _ = draw_panels(sweep_dir)
    assert panel.get_ylim()[1] < 1.5
    (pruned,) = [line for line in panel.lines if line.get_marker() == "^"]
    assert (list(pruned.get_xdata()), to_hex(pruned.get_markerfacecolor())) == ([9], "#ffffff")
    assert "1 pruned" in [text.get_text() for text in panel.figure.legends[0].get_texts()]


def test_zipped_keys_share_one_panel(sweep_dir):
    for lr, clip in (("1e-3", "1.0"), ("3e-3", "0.5")):
        for seed, loss in ((0, 1.0), (1, math.nan)):
            overrides = (f"hparams.lr={lr}", f"hparams.grad_clip_norm={clip}", f"hparams.seed={seed}")
            sweep_dir.job(*overrides, losses=(3.0, loss + float(lr)))
    panel, curves = draw_panels(sweep_dir)
    assert (panel.get_xlabel(), curves.get_xlabel()) == ("lr, grad_clip_norm", "optimizer step")
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.001, 1", "0.003, 0.5"]
    assert len(marks(panel, "x")) == 2


def test_evenly_spaced_values_with_one_small_value_have_a_linear_axis(sweep_dir):
    for number in (0.001, 0.1, 0.2, 0.3, 0.4):
        sweep_dir.job(f"optimizer.weight_decay={number}")
    assert draw_panels(sweep_dir)[0].get_xscale() == "linear"


def series(axes, kind="series"):
    """Return color and (x, y) points of each line of a kind."""
    return [
        (to_hex(line.get_color()), [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)])
        for line in axes.lines
        if line.get_gid() == kind
    ]


def legend(axes):
    """Return the texts and the marker colors of the legend above a panel."""
    row = axes.get_legend()
    colours = [to_hex(mark.get_markerfacecolor()) for mark in row.legend_handles if mark.get_marker() == "o"]
    return [text.get_text() for text in row.get_texts()], colours


def ticks(axes):
    axes.figure.canvas.draw()
    low, high = sorted(axes.get_xlim())
    return [
        label.get_text()
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if low <= tick <= high
    ]


def overlaps(axes):
    """Return pairs of neighboring tick labels that overlap."""
    axes.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    return [(one, other) for one, other in itertools.pairwise(boxes) if one.x1 > other.x0]


def test_second_parameter_sets_colors_and_lines_join_along_the_first(sweep_dir):
    for lr in (1, 2, 3):
        for layers in (2, 4):
            sweep_dir.job(f"hparams.lr={lr}", f"model.num_layers={layers}", losses=(9.0, lr + layers / 10))
    by_lr, by_layers, curves = undrawn(sweep_dir)
    names, colours = legend(by_lr)
    assert names == ["num_layers", "2", "4"]
    assert series(by_lr) == [
        (colours[0], [(1, 1.2), (2, 2.2), (3, 3.2)]),
        (colours[1], [(1, 1.4), (2, 2.4), (3, 3.4)]),
    ]
    dots = {(float(line.get_xdata()[0]), round(float(line.get_ydata()[0]), 1)): line for line in by_lr.lines}
    assert [to_hex(dots[x, y].get_markerfacecolor()) for x, y in ((3, 3.2), (2, 2.4))] == colours
    names, colours = legend(by_layers)
    assert (names, len(set(colours))) == (["lr", "1", "2", "3"], 3)
    assert [colour for colour, _ in series(by_layers)] == colours
    assert message(curves)[-1] == "lr, num_layers"
    assert message(curves)[:2] == ["1, 2", "1, 4"]
    ends = {to_hex(line.get_color()) for line in curves.lines}
    assert ends == {ORANGE, *colours}  # curves have the colors of the first parameter


def test_categories_have_distinct_colors_and_no_lines(sweep_dir):
    for optimizer in ("adamw", "muon"):
        for scheduler in ("wsd", "cosine"):
            sweep_dir.job(f"optimizer={optimizer}", f"scheduler={scheduler}")
    panel, _, _ = undrawn(sweep_dir)
    names, colours = legend(panel)
    assert names == ["scheduler", "wsd", "cosine"]
    assert len(set(colours)) == 2
    assert not {ORANGE, RED} & set(colours)
    assert series(panel) == []


def test_random_search_is_colored_by_the_other_parameter(sweep_dir):
    for number in range(30):
        sweep_dir.job(f"hparams.lr={1e-4 * 1.3**number:.6g}", f"a.b={0.01 * ((7 * number) % 30):.4f}")
    panel, _, curves = undrawn(sweep_dir)
    names, colours = legend(panel)
    assert names[0] == "b (30 values)"
    assert names[1] == "0"
    assert names[-1] == "0.29"
    assert len(set(colours)) == len(colours) >= 3
    assert series(panel) == []
    assert message(curves) == ["0.0001, 0"]  # only the best of many curves is labeled
    assert legend(curves)[0][0] == "lr (30 values)"


def test_equal_values_with_different_texts_have_one_color(sweep_dir):
    for lr in ("1", "1.0"):
        for decay in ("0.1", "0.2"):
            sweep_dir.job(f"hparams.lr={lr}", f"a.b={decay}")
    for panel in undrawn(sweep_dir)[:-1]:
        assert legend(panel)[0][0] in ("b", "lr")


def test_seeds_are_drawn_as_mean_and_deviation_without_a_panel(sweep_dir):
    for lr, losses in ((1, (1.0, 2.0, 3.0)), (2, (4.0, 4.0, 7.0))):
        for seed, loss in enumerate(losses):
            sweep_dir.job(f"hparams.lr={lr}", f"hparams.seed={seed}", losses=(9.0, loss))
    panel, curves = undrawn(sweep_dir)
    assert [points for _, points in series(panel)] == [[(1, 2.0), (2, 5.0)]]
    spreads = [[y for _, y in points] for _, points in series(panel, "std")]
    assert spreads == [[1.0, 3.0], [pytest.approx(5 - 3**0.5), pytest.approx(5 + 3**0.5)]]
    assert len(marks(panel, "_")) == 2
    assert message(curves) == ["1", "2", "lr"]


def test_sweep_over_seeds_only_has_a_seed_panel_without_lines(sweep_dir):
    for seed in range(4):
        sweep_dir.job(f"hparams.seed={seed}", losses=(3.0, 2.0 - seed / 10))
    panel, _ = undrawn(sweep_dir)
    assert panel.get_xlabel() == "seed"
    assert ticks(panel) == ["0", "1", "2", "3"]
    assert series(panel) + series(panel, "std") == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2, 3), ["1", "2", "3"]),
        ((2, 4), ["2", "4"]),
        ((1, 2, 3, 4, 6, 8, 12, 24, 48), None),
        (tuple(range(1, 15)), None),
        ((64, 128, 2048), ["64", "128", "2048"]),
    ],
)
def test_integer_ticks_are_integers_and_do_not_overlap(sweep_dir, values, expected):
    for value in values:
        sweep_dir.job(f"model.num_layers={value}")
    panel, _ = undrawn(sweep_dir)
    assert ticks(panel) == expected or (expected is None and all(text.isdecimal() for text in ticks(panel)))
    assert len(ticks(panel)) > 1
    assert overlaps(panel) == []


@pytest.mark.parametrize(
    "key_and_values",
    [
        ("hparams.lr", ("1e-4", "1.1e-4", "1.2e-4", "1e-3", "1.05e-3", "1e-2")),
        ("hparams.lr", ("0.1", "0.1000001", "0.1000002", "0.9")),
        ("data.path", tuple(f"a_folder_with_a_long_name/and_number_{n}" for n in range(4))),
        ("data.path", tuple(f"a_folder_with_a_long_name/and_number_{n}" for n in range(10))),
    ],
)
def test_close_and_long_tick_labels_do_not_overlap_and_fit_the_figure(sweep_dir, key_and_values):
    key, values = key_and_values
    for value in values:
        sweep_dir.job(f"{key}={value}")
    panel, _ = undrawn(sweep_dir)
    panel.figure.canvas.draw()
    labels = panel.get_xticklabels()
    assert overlaps(panel) == [] or labels[0].get_rotation() == 25
    assert min(label.get_window_extent().y0 for label in labels) > panel.xaxis.label.get_window_extent().y0 > 0
    assert len({label.get_text() for label in labels}) == len(labels)


@pytest.mark.parametrize(
    ("metric", "direction", "scale"),
    [
        ("val_accuracy", "maximize", "linear"),
        ("val_reward", "maximize", "linear"),
        ("val_word_error_rate", "minimize", "linear"),
        ("val_loss", "minimize", "log"),
    ],
)
def test_metrics_that_are_fractions_have_a_linear_axis(tmp_path, events, metric, direction, scale):
    sweep_dir = SweepDir(tmp_path / "sweep", type(events), metric=metric, direction=direction)
    for lr, value in ((1, 0.01), (2, 0.5), (3, 0.9)):
        run_dir = sweep_dir.job(f"hparams.lr={lr}", losses=(value / 2, value))
        for file in (run_dir / "metrics.jsonl", run_dir / "result.json"):
            file.write_text(file.read_text().replace("val_loss", metric))
    assert [axes.get_yscale() for axes in undrawn(sweep_dir)] == [scale, scale]


@pytest.mark.parametrize(
    ("key", "scale"),
    [("model.dropout", "linear"), ("objective.beta", "log"), ("optimizer.encoder_learning_rate", "log")],
)
def test_swept_fraction_has_a_linear_axis(sweep_dir, key, scale):
    for value in (0.01, 0.1, 0.5):
        sweep_dir.job(f"{key}={value}")
    assert undrawn(sweep_dir)[0].get_xscale() == scale


def test_curve_labels_do_not_overlap_and_long_ones_become_job_numbers(sweep_dir):
    for number in range(20):
        sweep_dir.job(f"hparams.lr={number}", losses=(3.0, 1.0 + number / 1000))
    _, curves = undrawn(sweep_dir)
    curves.figure.canvas.draw()
    *names, title = curves.texts
    boxes = [name.get_window_extent() for name in names]
    assert len(names) == 20
    assert title.get_text() == "lr"
    assert all(one.y1 <= other.y0 + 2 for one, other in itertools.pairwise(boxes))  # pixels
    assert max(box.x1 for box in boxes) < curves.figure.get_window_extent().x1
    sweep_dir.facts["jobs"].clear()
    shutil.rmtree(sweep_dir.folder)
    sweep_dir.folder.mkdir()
    for number in range(2):
        sweep_dir.job(f"data.path=a/path/that/is/long/{number}", f"data.other=another/path/that/is/long/{number}")
        sweep_dir.job(f"data.path=a/path/that/is/long/{number}", f"data.other=no/path/that/is/long/{number}")
    assert message(undrawn(sweep_dir)[-1]) == ["job 0", "job 1", "job 2", "job 3"]


def test_spread_moves_positions_as_little_as_necessary():
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([0.0, 0.0, 1.0, 1.0], 0.1) == pytest.approx([0.0, 0.1, 0.88, 0.98], abs=0.02)
    assert spread([], 0.1) == []


def test_each_of_two_parameters_has_a_panel(sweep_dir):
    for number in range(6):
        sweep_dir.job(f"hparams.lr={0.1 * number}", f"optimizer.weight_decay={number**2}", losses=(2.0, number + 1.0))
    assert [axes.get_xlabel() for axes in draw_panels(sweep_dir)] == ["lr", "weight_decay", "optimizer step"]


def test_categorical_parameter_spreads_its_jobs_side_by_side(sweep_dir):
    for optimizer in ("adamw", "muon"):
        for lr in (1, 2):
            for seed in (0, 1):
                sweep_dir.job(
                    f"optimizer={optimizer}", f"hparams.lr={lr}", f"hparams.seed={seed}", losses=(2.0, lr + seed)
                )
    panels = draw_panels(sweep_dir)
    assert [axes.get_xlabel() for axes in panels] == ["optimizer", "lr", "optimizer step"]
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["adamw", "muon"]
    places = sorted(x for x, _ in marks(panels[0], "o") + marks(panels[0], "*"))
    assert len(set(places)) == 8  # no two jobs at the same position
    assert all(abs(x - round(x)) < 0.3 for x in places)


@pytest.mark.parametrize("state", ["finished", "queued", "failed", "stopped"])
def test_figure_of_a_single_job_is_drawn_in_any_state(sweep_dir, state):
    sweep_dir.job("hparams.lr=1", state=state)
    (panel,) = draw_panels(sweep_dir)
    assert message(panel) == (["no learning curves"] if state == "queued" else ["job 0"])


def test_training_loss_is_drawn_before_the_first_evaluation(sweep_dir):
    sweep_dir.job("hparams.lr=1", state="stopped", losses=(3.0,))
    sweep_dir.job("hparams.lr=2", state="queued")
    assert draw_panels(sweep_dir)[-1].get_ylabel() == "training loss"


@pytest.mark.long
def test_figure_of_many_parameters_limits_its_panels(sweep_dir):
    for number in range(40):
        sweep_dir.job(*(f"group.key_{key}={number * key}" for key in range(1, 12)), losses=(2.0, 1.0 + number))
    assert len(draw_panels(sweep_dir)) == 9


def test_axis_range_ignores_outliers():
    values = [1.0, 1.1, 1.2, 1.3, 1.25, 1.15, 15.0]
    frame = Frame.around(values)
    assert not frame.is_log
    assert 0.9 < frame.low < 1.0
    assert 1.3 < frame.high < 3.0
    assert Frame.around([0.01, 1.0]).is_log
    same = Frame.around([2.0, 2.0])
    assert same.low < 2.0 < same.high
