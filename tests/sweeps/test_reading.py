import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from support.sweep_dirs import SweepDir, hold_lock

from foundry.core.errors import ConfigError
from foundry.sweeps.reading import Which, evaluations, read_sweep


@pytest.fixture
def sweep_dir(tmp_path, events):
    return SweepDir(tmp_path / "sweep", type(events))


def order(sweep):
    return [(job.index, job.state) for job in sweep.jobs]


def change(run_dir, **changes):
    path = run_dir / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_read_sweep_sorts_best_first_and_failed_last(sweep_dir):
    sweep_dir.job("hparams.lr=1e-3", losses=(3.0, 2.5))
    sweep_dir.job("hparams.lr=2e-3", state="failed", reason="NonFiniteError: loss is nan", step=50)
    sweep_dir.job("hparams.lr=3e-3", losses=(3.0, 1.5))
    sweep_dir.job("hparams.lr=4e-3", state="queued")
    sweep_dir.job("hparams.lr=5e-3", losses=(3.0, math.nan))
    with hold_lock(sweep_dir.job("hparams.lr=6e-3", state="running", losses=(1.0,), step=100)):
        sweep = read_sweep(sweep_dir.folder)
    assert order(sweep) == [
        (2, "finished"), (0, "finished"), (4, "finished"), (5, "running"), (3, "queued"), (1, "failed"),
    ]  # fmt: skip
    assert [job.metric for job in sweep.jobs[:2]] == [1.5, 2.5]
    assert math.isnan(sweep.jobs[2].metric)
    assert (sweep.jobs[3].metric, sweep.jobs[3].step, sweep.jobs[3].total_steps) == (1.0, 100, 200)
    assert sweep.jobs[5].note == "NonFiniteError: loss is nan"
    assert sweep.best is sweep.jobs[0]
    assert sweep.counts == {"finished": 3, "running": 1, "queued": 1, "failed": 1}


def test_read_sweep_sorts_by_direction_maximize(tmp_path, events):
    sweep_dir = SweepDir(tmp_path / "sweep", type(events), direction="maximize")
    sweep_dir.job("a=1", losses=(0.9, 0.2))
    sweep_dir.job("a=2", losses=(0.3, 0.4))
    assert [job.index for job in read_sweep(sweep_dir.folder).jobs] == [1, 0]


def test_which_best_compares_the_best_evaluations(sweep_dir):
    sweep_dir.job("a=1", losses=(1.0, 2.0))
    sweep_dir.job("a=2", losses=(1.8, 1.5))
    with hold_lock(sweep_dir.job("a=3", state="running", losses=(2.0, math.nan, 1.2, 1.9), step=80)):
        last = read_sweep(sweep_dir.folder)
        best = read_sweep(sweep_dir.folder, Which.best)
    assert [(job.index, job.metric) for job in last.jobs] == [(1, 1.5), (0, 2.0), (2, 1.9)]
    assert [(job.index, job.metric) for job in best.jobs] == [(0, 1.0), (1, 1.5), (2, 1.2)]


def test_interval_belongs_to_the_compared_evaluation(sweep_dir):
    run_dir = sweep_dir.job("a=1", losses=(1.0, 2.0))
    sweep_dir.job("a=2", losses=(1.8, 1.5))
    sweep_dir.add_interval(run_dir, (0.75, 1.25), (1.5, 2.5))
    result = json.loads((run_dir / "result.json").read_text())
    (run_dir / "result.json").write_text(json.dumps(result | {"best": {"step": 100, "val_loss": 1.0}}))
    last, best = read_sweep(sweep_dir.folder), read_sweep(sweep_dir.folder, Which.best)
    assert {job.index: job.interval for job in last.jobs} == {0: (1.5, 2.5), 1: None}
    assert {job.index: job.interval for job in best.jobs} == {0: (0.75, 1.25), 1: None}
    (run_dir / "result.json").write_text(json.dumps(result | {"val_loss_low": math.nan}))
    assert not read_sweep(sweep_dir.folder).has_intervals


def test_own_metric_is_read_from_the_evaluations(tmp_path, events):
    sweep_dir = SweepDir(tmp_path / "sweep", type(events), metric="val_accuracy", direction="maximize")
    run_dir = sweep_dir.job("a=1")
    assert read_sweep(sweep_dir.folder).jobs[0].metric == 0.2  # value in the events' metrics
    assert evaluations(read_sweep(sweep_dir.folder).jobs[0], "val_accuracy") == [(100, 0.2), (200, 0.2)]
    (run_dir / "metrics.jsonl").unlink()
    assert read_sweep(sweep_dir.folder).jobs[0].metric is None


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([["hparams.lr=1", "a.b=1"], ["hparams.lr=2", "a.b=1"]], {"hparams.lr": "lr"}),
        ([["a.size=1", "b.size=1"], ["a.size=2", "b.size=2"]], {"a.size": "a.size", "b.size": "b.size"}),
        ([["optimizer=sgd"], ["optimizer=adamw", "+x.new=1"]], {"optimizer": "optimizer", "x.new": "new"}),
        ([["a=1", "a=3"], ["a=2", "a=3"]], {}),
        ([["a=1"]], {}),
    ],
)
def test_names_cover_only_differing_keys_in_their_shortest_form(sweep_dir, overrides, names):
    for job in overrides:
        sweep_dir.job(*job)
    assert read_sweep(sweep_dir.folder).names == names


def test_sweep_gives_settings_and_repeat_command_of_a_job(sweep_dir):
    sweep_dir.job("hparams.lr=1e-3", shared=["debug=fast", "data.path='a b.txt'"])
    sweep_dir.job("hparams.lr=2e-3", losses=(5.0,))
    sweep = read_sweep(sweep_dir.folder)
    assert sweep.settings(sweep.best) == "lr=1e-3"
    assert sweep.repeat(sweep.best) == """python -m foundry debug=fast 'data.path='"'"'a b.txt'"'"'' hparams.lr=1e-3"""


def test_repeat_of_a_hparams_search_job_sets_mode_run(tmp_path, events):
    sweep_dir = SweepDir(tmp_path / "sweep", type(events), command=["hparams_search=lr_range"])
    sweep_dir.job("hparams.lr=1e-3", shared=["hparams_search=lr_range"])
    sweep = read_sweep(sweep_dir.folder)
    assert sweep.repeat(sweep.best) == "python -m foundry hparams_search=lr_range hparams.lr=1e-3 hydra.mode=RUN"


def last_sign(run_dir):
    """Return the time of the last write of the job's status."""
    return datetime.fromisoformat(json.loads((run_dir / "status.json").read_text())["updated"])


def test_running_job_without_a_process_is_lost(sweep_dir):
    run_dir = sweep_dir.job("a=1", state="running")
    with hold_lock(run_dir):
        assert order(read_sweep(sweep_dir.folder)) == [(0, "running")]
    sweep = read_sweep(sweep_dir.folder, now=last_sign(run_dir) + timedelta(minutes=12))
    assert order(sweep) == [(0, "lost")]
    assert sweep.jobs[0].note == "its process has ended; last update 0:12:00 ago"
    assert (sweep.exit_code, sweep.is_going) == (1, False)


def test_note_of_a_lost_job_is_its_reason(sweep_dir):
    sweep_dir.job("a=1", state="lost", reason="Slurm no longer knows job 7")
    assert read_sweep(sweep_dir.folder).jobs[0].note == "Slurm no longer knows job 7"


@pytest.mark.parametrize("state", ["queued", "requeued"])
def test_queued_jobs_of_an_ended_sweep_are_not_going(sweep_dir, state):
    sweep_dir.job("a=1")
    run_dir = sweep_dir.job("a=2", state="failed", reason="was")
    change(run_dir, state=state)
    with hold_lock(sweep_dir.folder):
        sweep = read_sweep(sweep_dir.folder)
        assert (order(sweep), sweep.is_going) == ([(0, "finished"), (1, state)], True)
    sweep = read_sweep(sweep_dir.folder)
    assert (order(sweep), sweep.is_going, sweep.exit_code) == ([(0, "finished"), (1, state)], False, 3)
    assert sweep.jobs[1].note == "the sweep is not running; the same command resumes it"
    with hold_lock(run_dir):
        assert read_sweep(sweep_dir.folder).is_going  # a job outlives the sweep that started it
    with hold_lock(sweep_dir.folder, host="elsewhere"):
        pass
    assert read_sweep(sweep_dir.folder).is_going  # another host may hold the lock, so assume that it does


def test_jobs_submitted_to_slurm_are_going_without_the_sweep(tmp_path, events):
    sweep_dir = SweepDir(tmp_path / "sweep", type(events), launcher="slurm")
    submitted = sweep_dir.job("a=1", state="failed")
    change(submitted, state="queued")
    (submitted / "slurm.json").write_text(json.dumps({"job_id": "31_0", "error_output": "x"}))
    with hold_lock(sweep_dir.folder):
        pass
    assert read_sweep(sweep_dir.folder).is_going
    change(sweep_dir.job("a=2", state="failed"), state="queued")  # the sweep died before it submitted this job
    sweep_dir.facts["launcher"] = "lab"  # a launcher option of the user, with a partition
    sweep_dir.job("a=3")
    first, second, _ = sorted(read_sweep(sweep_dir.folder).jobs, key=lambda job: job.index)
    assert (first.is_going, first.slurm_id, first.note) == (True, "31_0", "")
    assert (second.is_going, second.slurm_id) == (False, "")


def test_read_sweep_without_locks_keeps_held_locks(sweep_dir):
    with hold_lock(sweep_dir.job("a=1", state="failed", reason="was")):
        assert order(read_sweep(sweep_dir.folder, locks=False)) == [(0, "failed")]
        assert order(read_sweep(sweep_dir.folder)) == [(0, "running")]


def test_pruned_job_ranks_behind_complete_jobs(sweep_dir):
    sweep_dir.prune(sweep_dir.job("a=1", losses=(3.0, 1.0)))
    sweep_dir.job("a=2", losses=(3.0, 2.0))
    sweep = read_sweep(sweep_dir.folder)
    assert [(job.index, job.state, job.note) for job in sweep.jobs] == [
        (1, "finished", ""),
        (0, "finished", "pruned: val_loss 9 at 25% of the run"),
    ]
    assert (sweep.best.index, sweep.exit_code) == (1, 0)


def test_silent_job_on_another_machine_stays_running_with_a_note(sweep_dir):
    run_dir = sweep_dir.job("a=1", state="running")
    with hold_lock(run_dir, host="elsewhere"):
        pass
    now = last_sign(run_dir)
    assert read_sweep(sweep_dir.folder, now=now).jobs[0].note == ""
    sweep = read_sweep(sweep_dir.folder, now=now + timedelta(minutes=12))
    assert (sweep.jobs[0].state, sweep.jobs[0].note) == ("running", "no update for 0:12:00")
    assert (sweep.exit_code, sweep.is_going) == (3, True)


def test_job_with_a_held_lock_is_running_before_its_status_changes(sweep_dir):
    with hold_lock(sweep_dir.job("a=1", state="queued")), hold_lock(sweep_dir.job("a=2", state="failed", reason="was")):
        assert [(job.state, job.note) for job in read_sweep(sweep_dir.folder).jobs] == [("running", "")] * 2


def test_job_seconds_are_the_time_since_its_start(sweep_dir):
    run_dir = sweep_dir.job("a=1")
    change(run_dir, started="2026-01-01T10:00:00.000+00:00", updated="2026-01-01T11:00:01.000+00:00")
    assert read_sweep(sweep_dir.folder).jobs[0].seconds == 3601.0
    with hold_lock(sweep_dir.job("a=2", state="running")):
        later = datetime.now(UTC) + timedelta(seconds=100)
        assert read_sweep(sweep_dir.folder, now=later).jobs[1].seconds == pytest.approx(100, abs=5)
    queued = sweep_dir.job("a=3", state="failed")
    change(queued, state="queued")
    assert next(job for job in read_sweep(sweep_dir.folder).jobs if job.index == 2).seconds is None


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["finished", "finished"], 0),
        (["finished", "failed"], 1),
        (["failed", "queued"], 1),
        (["finished", "queued"], 3),
        (["finished", "stopped"], 3),
        (["finished", "requeued"], 3),
    ],
)
def test_exit_code_reflects_the_states_of_the_jobs(sweep_dir, states, code):
    for number, state in enumerate(states):
        sweep_dir.job(f"a={number}", state=state)
    assert read_sweep(sweep_dir.folder).exit_code == code


def test_failed_job_is_never_the_best(sweep_dir):
    sweep_dir.job("a=1", state="failed", losses=(1.0,))
    assert read_sweep(sweep_dir.folder).best is None
    sweep_dir.job("a=2", state="stopped", losses=(5.0,))
    assert read_sweep(sweep_dir.folder).best.index == 1


def test_note_of_a_failure_without_a_reason_is_the_end_of_its_log(sweep_dir):
    sweep_dir.job("a=1", state="failed")
    assert read_sweep(sweep_dir.folder).jobs[0].note == "the last line"


def test_read_sweep_accepts_a_folder_of_runs_without_sweep_json(sweep_dir):
    for number in range(11):
        sweep_dir.job(f"hparams.lr={number}", losses=(3.0, 20.0 - number))
    (sweep_dir.folder / "sweep.json").unlink()
    (sweep_dir.folder / "notes").mkdir()
    sweep = read_sweep(sweep_dir.folder)
    assert [job.index for job in sweep.jobs] == list(range(10, -1, -1))
    assert sweep.names == {"hparams.lr": "lr"}
    for number in range(11):
        (sweep_dir.folder / str(number)).rename(sweep_dir.folder / f"run_{number:02}")
    (sweep_dir.folder / "run_03" / ".hydra" / "overrides.yaml").unlink()
    sweep = read_sweep(sweep_dir.folder)
    assert [job.index for job in sweep.jobs] == list(range(10, -1, -1))
    assert sweep.settings(sweep.jobs[-4]) == ""


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"state": null, "updated": 7}'])
def test_broken_status_of_a_job_does_not_hide_other_jobs(sweep_dir, broken):
    run_dir = sweep_dir.job("a=1")
    sweep_dir.job("a=2")
    (run_dir / "status.json").write_text(broken)
    sweep = read_sweep(sweep_dir.folder)
    assert [job.index for job in sweep.jobs] == [1, 0]
    assert sweep.exit_code == 3


def test_read_sweep_refuses_folders_that_are_not_sweeps(sweep_dir):
    with pytest.raises(ConfigError, match=r"^dir: is .*nowhere, which is not a folder"):
        read_sweep(sweep_dir.folder / "nowhere")
    with pytest.raises(ConfigError, match=r"without sweep\.json and without run directories"):
        read_sweep(sweep_dir.folder)
    run_dir = sweep_dir.job("a=1")
    with pytest.raises(ConfigError, match="a single run; give the folder that contains it"):
        read_sweep(run_dir)
    (sweep_dir.folder / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match="whose list of jobs cannot be read"):
        read_sweep(sweep_dir.folder)
