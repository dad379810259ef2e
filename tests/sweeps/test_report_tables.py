import csv
import io
import json
import math
import shutil
import subprocess
import sys

import pytest
from rich.console import Console
from support.sweep_dirs import SweepDir, hold_lock

from foundry.sweeps.parameters import metric_text
from foundry.sweeps.reading import Which, read_sweep
from foundry.sweeps.report import screen, show
from foundry.sweeps.report_files import write_csv, write_json


@pytest.fixture
def sweep_dir(tmp_path, events):
    return SweepDir(tmp_path / "sweep", type(events))


def render(sweep, **options):
    console = Console(file=io.StringIO(), **options)
    show(sweep, console)
    return console.file.getvalue().splitlines()


@pytest.fixture
def mixed(sweep_dir):
    """The folder of a sweep with jobs in several states."""
    sweep_dir.job("hparams.lr=1e-3", "optimizer=sgd", losses=(3.0, 2.5), shared=["debug=fast"])
    sweep_dir.job("hparams.lr=2e-3", "optimizer=sgd", losses=(1.25, 1.5), shared=["debug=fast"])
    sweep_dir.job("hparams.lr=3e-3", "optimizer=muon", state="failed", reason="ValueError: " + "long [word] " * 20)
    sweep_dir.job("hparams.lr=4e-3", "optimizer=muon", state="queued")
    return sweep_dir.folder


def test_report_to_a_file_has_plain_lines(mixed):
    lines = render(read_sweep(mixed))
    assert lines[0].split() == ["job", "lr", "optimizer", "state", "step", "val_loss", "time", "log", "note"]
    assert lines[1].split() == [
        "1",
        "2e-3",
        "sgd",
        "finished",
        "200/200",
        "1.5000",
        "0:00:00",
        f"{mixed}/1/foundry.log",
    ]
    assert lines[2].split()[0] == "0"
    assert lines[3].split() == ["3", "4e-3", "muon", "queued", "-", "-", "-", "-"]
    failed = lines[4].split()
    assert failed[:6] == ["2", "3e-3", "muon", "failed", "200/200", "2.0000*"]
    assert lines[4].endswith("long [word] long [word]")
    assert len({line.index("finished") for line in lines[1:3]} | {lines[4].index("failed")}) == 1
    assert lines[5:] == [
        "4 jobs: 2 finished, 1 queued, 1 failed",
        "best: job 1, val_loss 1.5000, lr=2e-3 optimizer=sgd",
        "repeat: python -m foundry debug=fast hparams.lr=2e-3 optimizer=sgd",
    ]


def test_report_shows_intervals_in_a_column(sweep_dir):
    sweep_dir.add_interval(sweep_dir.job("a=1", losses=(0.9, 0.95)), (0.85, 0.95), (0.9, 0.975))
    sweep_dir.job("a=2", losses=(0.9, 0.99))
    head, first, second, *_ = render(read_sweep(sweep_dir.folder))
    assert head.split()[:6] == ["job", "a", "state", "step", "val_loss", "interval"]
    assert "  0.9500  0.9000 to 0.9750  " in first
    assert second.split()[4:6] == ["0.9900", "-"]
    on_screen = "\n".join(render(read_sweep(sweep_dir.folder), force_terminal=True, width=200, no_color=True))
    assert "0.9000 to 0.9750" in on_screen


def test_narrow_terminal_still_shows_values_states_and_errors(mixed):
    lines = render(read_sweep(mixed), force_terminal=True, width=80, color_system=None)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for message in (
        "lr",
        "2e-3",
        "finished",
        "queued",
        "1.5000",
        "2.0000*",
        "job 2: ValueError: long [word]",
        "repeat:",
    ):
        assert message in text


def test_narrow_terminal_drops_log_paths_first_and_then_cuts_long_values(sweep_dir):
    for number in range(2):
        sweep_dir.job(*(f"group.a_long_name_{key}={'value_' * 5}{number}" for key in range(2)))
    wide, narrow = (
        render(read_sweep(sweep_dir.folder), force_terminal=True, width=width, color_system=None) for width in (160, 80)
    )
    assert [column in wide[2] for column in ("log", "a_long_name_0")] == [True, True]
    assert [column in narrow[2] for column in ("job", "log", "a_long_na", "state", "val_loss", "time")] == [
        True, False, True, True, True, True,
    ]  # fmt: skip
    assert "finished  200/200    2.0000" in narrow[4]


def test_report_merges_equal_failures_of_several_jobs(sweep_dir):
    for number in range(10):
        sweep_dir.job(f"a={number}", state="failed", reason="ValueError: as ever")
    sweep_dir.job("a=10", state="failed", reason="KeyError: another")
    lines = render(read_sweep(sweep_dir.folder), force_terminal=True, width=300, color_system=None)
    message = [line for line in lines if "Error" in line]
    assert message[0].startswith("jobs 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: ValueError: as ever; ")
    assert message[0].endswith("sweep/0/foundry.log")
    assert message[1].startswith("job 10: KeyError: another; ")


def test_screen_without_scrolling_shows_running_and_best_jobs(sweep_dir):
    for number in range(60):
        sweep_dir.job(f"a={number}", losses=(2.0, 1.0 + number))
    sweep_dir.job("a=60", state="running", losses=(3.0,))
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    with hold_lock(sweep_dir.folder / "60"):
        console.print(screen(read_sweep(sweep_dir.folder), console, scrolls=False))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 24
    rows = [line.split() for line in lines if "finished " in line or "running " in line]
    assert [row[0] for row in rows[:-1]] == [str(number) for number in range(len(rows) - 1)]
    assert rows[-1][0] == "60"
    assert f"and {61 - len(rows)} more jobs" in lines
    assert "61 jobs: 60 finished, 1 running" in lines


def test_report_of_a_search_shortens_numbers_and_counts_pruned_jobs(sweep_dir):
    sweep_dir.job("hparams.lr=0.0012345678901234", "model.num_layers=12")
    sweep_dir.prune(sweep_dir.job("hparams.lr=0.09876543210987654", "model.num_layers=1234567890"))
    lines = render(read_sweep(sweep_dir.folder))
    assert lines[1].split()[:3] == ["0", "0.001235", "12"]
    assert lines[2].split()[5] == "2.0000*"
    assert lines[2].endswith("pruned: val_loss 9 at 25% of the run")
    assert lines[3:5] == [
        "2 jobs: 2 finished; 1 of them pruned",
        "best: job 0, val_loss 2.0000, lr=0.001235 num_layers=12",
    ]
    assert "hparams.lr=0.0012345678901234" in lines[5]


def test_report_of_successive_halving_shows_rungs_and_paused_jobs(sweep_dir):
    done = sweep_dir.job("lr=1", losses=(2.0, 1.0))
    first = sweep_dir.job("lr=2", state="paused", losses=(1.5,), step=10, reason="rung 1 at 10 steps: val_loss 1.5")
    second = sweep_dir.job("lr=3", state="paused", losses=(1.9,), step=30, reason="rung 2 at 30 steps: val_loss 1.9")
    going = sweep_dir.job("lr=4", state="running", losses=(1.2,), step=20)
    over = sweep_dir.job("lr=5", losses=(4.0,), step=10)
    sweep_dir.prune(over)
    for run_dir, rung in ((done, 4), (first, 1), (second, 2), (going, 2), (over, 1)):
        sweep_dir.set_rung(run_dir, rung)
    with hold_lock(going), hold_lock(sweep_dir.folder):
        sweep = read_sweep(sweep_dir.folder)
        header, *rows = render(sweep)[:6]
    place = header.split().index("rung")
    found = {cells[1]: (cells[2], cells[place]) for cells in map(str.split, rows)}
    assert list(found.items()) == [
        ("1", ("finished", "3")),
        ("5", ("finished", "1")),
        ("4", ("running", "1")),
        ("3", ("paused", "2")),
        ("2", ("paused", "1")),
    ]
    assert rows[3].endswith("rung 2 at 30 steps: val_loss 1.9")
    assert sweep.counts == {"finished": 2, "running": 1, "paused": 2}
    jobs = json.loads(write_json(sweep).read_text())["jobs"]
    assert [job["rung"] for job in jobs] == [3, 1, 1, 2, 1]
    assert all(job.is_going == (job.state in ("running", "paused")) for job in sweep.jobs)
    ended = read_sweep(sweep_dir.folder)  # the process of the search has ended
    assert {job.is_going for job in ended.jobs if job.state == "paused"} == {False}
    assert ended.exit_code != 0


def test_report_names_the_squeue_command_of_slurm_jobs(tmp_path, events):
    sweep_dir = SweepDir(tmp_path / "sweep", type(events), launcher="slurm")
    for number, name in enumerate(("31_0", "31_1", "40")):
        run_dir = sweep_dir.job(f"a={number}", state="queued")
        run_dir.mkdir()
        (run_dir / "slurm.json").write_text(json.dumps({"job_id": name}))
    assert "in Slurm: squeue --jobs=31,40" in render(read_sweep(sweep_dir.folder))


@pytest.fixture
def seeded(sweep_dir):
    """Two learning rates with three seeds each, and a third rate with one diverged seed and one stopped seed."""
    for lr, losses in (("1e-3", (1.0, 2.0, 3.0)), ("2e-3", (1.5, 1.75, 2.0)), ("3e-3", (1.0, math.nan, 1.1))):
        for seed, loss in enumerate(losses):
            state = "stopped" if loss == 1.1 else "finished"
            sweep_dir.job(f"hparams.lr={lr}", f"hparams.seed={seed}", losses=(3.0, loss), state=state)
    return sweep_dir


def test_report_has_mean_and_std_over_seeds(seeded):
    sweep = read_sweep(seeded.folder)
    lines = render(sweep)
    assert [line.split() for line in lines[11:15]] == [
        ["lr", "seeds", "mean", "val_loss", "std"],
        ["2e-3", "3/3", "1.7500", "0.2500"],
        ["1e-3", "3/3", "2.0000", "1.0000"],
        ["3e-3", "1/3", "1.0000", "-"],  # the mean excludes the diverged and the stopped seed
    ]
    assert "best: job 0, val_loss 1.0000, lr=1e-3 seed=0" in lines
    assert "best over seeds: lr=2e-3, val_loss 1.7500 ± 0.2500 of 3 seeds" in lines
    on_screen = " ".join(" ".join(render(sweep, force_terminal=True, width=120, color_system=None)).split())
    assert "lr seeds mean val_loss std" in on_screen
    assert "2e-3 3/3 1.7500 0.2500" in on_screen
    content = json.loads(write_json(sweep).read_text())["over_seeds"]
    assert content[0] == {
        "swept": {"hparams.lr": "2e-3"}, "jobs": [3, 4, 5], "measured": 3, "mean": 1.75, "std": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    "jobs",
    [
        [("hparams.lr=1", "hparams.seed=0"), ("hparams.lr=2", "hparams.seed=1")],  # zipped
        [("hparams.lr=1",), ("hparams.lr=2",)],
    ],
)
def test_report_has_no_seed_table_without_repeated_seeds(sweep_dir, jobs):
    for overrides in jobs:
        sweep_dir.job(*overrides)
    text = "\n".join(render(read_sweep(sweep_dir.folder)))
    assert "std" not in text
    assert "over seeds" not in text


def test_report_of_a_sweep_over_seeds_only_has_one_mean(sweep_dir):
    for seed, loss in enumerate((1.0, 2.0, 3.0)):
        sweep_dir.job(f"hparams.seed={seed}", losses=(3.0, loss))
    lines = render(read_sweep(sweep_dir.folder))
    assert lines[6].split() == ["3/3", "2.0000", "1.0000"]
    assert "best over seeds: val_loss 2.0000 ± 1.0000 of 3 seeds" in lines


def test_report_labels_the_metric_as_best_for_which_best(mixed):
    lines = render(read_sweep(mixed, Which.best))
    assert "best val_loss" in lines[0]
    assert "best: job 1, best val_loss 1.2500, lr=2e-3 optimizer=sgd" in lines


def test_report_without_a_result_has_no_repeat_command(sweep_dir):
    sweep_dir.job("a=1", state="queued")
    assert render(read_sweep(sweep_dir.folder))[-2:] == ["1 job: 1 queued", "no job has a val_loss yet"]
    sweep_dir.facts["jobs"].clear()
    sweep_dir.job("a=1", state="failed", losses=())
    assert render(read_sweep(sweep_dir.folder))[-2:] == ["1 job: 1 failed", "no job has finished"]
    sweep_dir.facts["jobs"].clear()
    shutil.rmtree(sweep_dir.folder / "0")
    sweep_dir.job("a=1", losses=(math.nan,))
    assert render(read_sweep(sweep_dir.folder))[-1] == "no job has a finite val_loss"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1.23456, "1.2346"), (0.00123456, "0.001235"), (123456.0, "1.235e+05"), (math.nan, "nan")],
)
def test_metric_text_keeps_four_or_more_significant_digits(value, text):
    assert metric_text(value) == text


def test_report_csv_has_all_overrides_and_numbers(mixed):
    with write_csv(read_sweep(mixed)).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == ["1", "0", "3", "2"]
    assert (rows[0]["hparams.lr"], rows[0]["optimizer"], rows[0]["run_dir"]) == ("2e-3", "sgd", "1")
    assert [float(rows[0][name]) for name in ("metric", "val_loss", "loss", "best.val_loss")] == [1.5, 1.5, 2.0, 1.25]
    assert (rows[2]["state"], rows[2]["metric"], rows[2]["loss"]) == ("queued", "", "")
    assert rows[3]["note"].startswith("ValueError: long [word]")


def test_report_json_is_strict_and_complete(sweep_dir):
    sweep_dir.job("a=1", losses=(2.0, math.nan))
    sweep_dir.job("a=2")
    content = json.loads(write_json(read_sweep(sweep_dir.folder)).read_text(), parse_constant=pytest.fail)
    assert (content["best"], content["repeat"]) == (1, "python -m foundry a=2")
    assert (content["metric"], content["direction"], content["counts"]) == ("val_loss", "minimize", {"finished": 2})
    assert [job["swept"] for job in content["jobs"]] == [{"a": "2"}, {"a": "1"}]
    assert content["jobs"][0]["result"]["best"] == {"step": 200, "val_loss": 2.0}
    assert content["jobs"][1]["metric"] == "NaN"


def test_report_handles_five_hundred_jobs(sweep_dir):
    first = sweep_dir.job("hparams.lr=0")
    entries = [sweep_dir.facts["jobs"][0]]
    for number in range(1, 500):
        shutil.copytree(first, sweep_dir.folder / str(number))
        entries.append(entries[0] | {"index": number, "dir": str(number), "overrides": [f"hparams.lr={number}"]})
    (sweep_dir.folder / "sweep.json").write_text(json.dumps(sweep_dir.facts | {"jobs": entries}))
    sweep = read_sweep(sweep_dir.folder)
    lines = render(sweep)
    write_csv(sweep)
    write_json(sweep)
    assert len(lines) == 504


def test_report_imports_neither_torch_nor_matplotlib():
    code = "import sys, foundry.report; print({'torch', 'matplotlib', 'transformers', 'mlflow'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "set()\n"
